"""What KTO says of its data before it trains."""

from pathlib import Path

import pytest

from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.tasks.posttrain.kto import warn_of_one_kind
from tests.llm.preferences import Judged, write_unpaired

KINDS = {"good": [True, True], "bad": [False, False], "both": [True, False]}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, InstructionData]:
    for name, labels in KINDS.items():
        write_unpaired(tmp_path / name, [Judged([1, 2], [3], label) for label in labels])
    return {name: InstructionData(str(tmp_path / name)) for name in KINDS}


@pytest.mark.parametrize(
    ("names", "warning"),
    [
        (["good"], "are desirable: KTO compares them with undesirable ones"),
        (["bad"], "are undesirable: KTO compares them with desirable ones"),
        (["both"], ""),
        (["good", "bad"], ""),  # a blend of two data sets
    ],
)
def test_completions_of_one_kind_get_a_warning(data, caplog, names, warning):
    warn_of_one_kind([data[name] for name in names])
    assert warning in caplog.text and bool(warning) == bool(caplog.records)
