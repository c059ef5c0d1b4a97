"""Warnings about what Megatron itself does, which whoever runs Megatron cannot act on."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindspeed.features.base import Effect, Feature, Level

_MESSAGES = (
    r"`torch\.distributed\.\w+` is deprecated",
    r"`(load|save)_state_dict` is deprecated",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
    r"`torch\.jit\.script\w*` is deprecated",
    r"full scope is deprecated",  # Megatron warns of its own default
)


@contextmanager
def _ignored() -> Iterator[None]:
    before = list(warnings.filters)
    for message in _MESSAGES:
        warnings.filterwarnings("ignore", message, category=Warning)
    ours = [entry for entry in warnings.filters if entry not in before]
    yield
    warnings.filters[:] = [entry for entry in warnings.filters if entry not in ours]  # type: ignore[index]


class QuietDeprecations(Feature):
    """One line a step about a torch function that Megatron will replace some day helps nobody."""

    name = "quiet_deprecations"
    title = "Quiet deprecations"
    group = "Foundation"
    level = Level.COMPAT

    def effects(self, options: Any) -> Iterator[Effect]:
        """Ignore exactly these warnings."""
        yield Effect("deprecation warnings about what Megatron itself does are hidden", _ignored())
