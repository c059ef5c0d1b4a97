"""The compat table: complete, explained on its page, and undone without traces.

`python -m tests.unit.compat.test_table` writes the table of docs/compat.md.
"""

import logging
import re
import warnings
from pathlib import Path

import pytest

from mindspeed.compat.table import TABLE
from mindspeed.patching import find_without_import

PAGE = Path(__file__).resolve().parents[3] / "docs" / "compat.md"
HIDDEN = "`torch.distributed.reduce_scatter_tensor` is deprecated. Please use something else."


def page():
    """Return the page with its table written from the entries."""
    lines = ["| entry | reason | devices | megatron-core |", "|---|---|---|---|"]
    for entry in TABLE:
        devices = ", ".join(entry.devices or ["all"])
        link = f"[{entry.name}](#{entry.name})"
        lines.append(f"| {link} | {entry.reason} | {devices} | {entry.versions} |")
    table = "\n".join(["<!-- table -->", *lines, "<!-- /table -->"])
    return re.sub("<!-- table -->.*<!-- /table -->", table, PAGE.read_text(), flags=re.DOTALL)


def test_the_page_has_the_table_and_a_section_for_each_entry():
    assert PAGE.read_text() == page(), __doc__
    sections = re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE)
    assert sections == [entry.name for entry in TABLE]


def test_names_are_unique_and_every_entry_changes_something():
    names = [entry.name for entry in TABLE]
    assert names == sorted(set(names))
    has_plans = find_without_import("megatron.core.models.gpt.fine_grained_callables") is not None
    for entry in TABLE:
        if entry.name != "single_local_expert" or has_plans:
            assert entry.patches or entry.effects is not tuple, entry.name
        assert all(patch.why for patch in entry.patches), entry.name


def shown(message):
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn(message, FutureWarning, stacklevel=1)
    return [str(warning.message) for warning in caught]


@pytest.fixture
def default_filters():
    """Start from no filters at all, whatever the command line says."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield


def test_only_deprecations_inside_megatron_are_hidden(default_filters):
    before = list(warnings.filters)
    [entry] = [each for each in TABLE if each.name == "quiet_deprecations"]
    [effect] = entry.effects()
    with effect.context:
        assert shown(HIDDEN) == []
        assert shown("your tensors are upside down") == ["your tensors are upside down"]
    assert list(warnings.filters) == before
    assert shown(HIDDEN) == [HIDDEN]


def test_only_logged_deprecations_of_megatron_are_hidden(caplog, monkeypatch):
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    monkeypatch.setattr(logger, "filters", [])
    [entry] = [each for each in TABLE if each.name == "quiet_deprecations"]
    [effect] = entry.effects()
    with effect.context:
        logger.warning("GPTModel IS DEPRECATED. Please reference the migration guide")
        logger.warning("your layers are upside down")
    assert caplog.messages == ["your layers are upside down"]
    logger.warning("GPTModel IS DEPRECATED.")
    assert caplog.messages[1:] == ["GPTModel IS DEPRECATED."]


if __name__ == "__main__":
    PAGE.write_text(page())
