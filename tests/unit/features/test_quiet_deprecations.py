"""Only the warnings nobody can act on are hidden, and only while the feature is on."""

import warnings

import pytest

from mindspeed.features.quiet_deprecations import QuietDeprecations

HIDDEN = "`torch.distributed.reduce_scatter_tensor` is deprecated. Please use something else."


def shown(message):
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn(message, FutureWarning, stacklevel=1)
    return [str(warning.message) for warning in caught]


@pytest.fixture(autouse=True)
def default_filters():
    """Start from no filters at all, whatever the command line says."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield


def test_filters_come_and_go():
    before = list(warnings.filters)
    [effect] = QuietDeprecations().effects(None)
    with effect.context:
        assert shown(HIDDEN) == []
        assert shown("your tensors are upside down") == ["your tensors are upside down"]
    assert list(warnings.filters) == before
    assert shown(HIDDEN) == [HIDDEN]
