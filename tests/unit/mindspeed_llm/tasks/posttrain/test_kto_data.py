"""What KTO says of its data before it trains, and the samples that it estimates KL with."""

from pathlib import Path

import numpy as np
import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.stream import SampleStream
from mindspeed_llm.tasks.posttrain.kto import MismatchedStream, check_kinds
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
    check_kinds([data[name] for name in names], 1.0, 1.0)
    assert warning in caplog.text and bool(warning) == bool(caplog.records)


@pytest.mark.parametrize(
    ("name", "weights", "expected"),
    [
        ("good", (0.0, 1.0), "--kto-desirable-weight 0: all completions of the data are desirable"),
        ("bad", (1.0, 0.0), "--kto-undesirable-weight 0: all completions of the data are undesir"),
    ],
)
def test_completions_without_weight_are_refused(data, name, weights, expected):
    """As the only ones; beside others they may have none."""
    with pytest.raises(ConfigError) as error:
        check_kinds([data[name]], *weights)
    assert str(error.value).startswith(expected)
    assert "so nothing would be trained: give a weight above 0, or add " in str(error.value)
    check_kinds([data["both"]], *weights)
    check_kinds([data[name]], *reversed(weights))


def test_mismatched_samples_have_the_labels_of_their_completion():
    """What a template appends to an answer has no label, here as in the samples themselves."""
    samples = [
        {"input_ids": np.array(ids), "labels": np.array(labels)}
        for ids, labels in (([1, 2, 3, 9], [-100, -100, 3, -100]), ([4, 5, 6], [-100, 5, 6]))
    ]
    stream = MismatchedStream(SampleStream([samples], shuffle=False), 2, 4)
    found = [
        [one[f"mismatched_{key}"].tolist() for key in ("input_ids", "labels")]
        for one in (stream[0], stream[1])
    ]
    assert found == [
        [[1, 2, 5, 6], [-100, -100, 5, 6]],
        [[4, 3, 9], [-100, 3, -100]],
    ]
