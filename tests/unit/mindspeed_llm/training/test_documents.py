"""Windows over the tokens of documents."""

import numpy as np
import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.data.indexed import TokenWriter
from mindspeed_llm.training.documents import DocumentWindows


@pytest.fixture
def prefix(tmp_path):
    writer = TokenWriter(tmp_path, "data", np.dtype("<u2"))
    writer.append(np.arange(11), np.array([4, 7]))
    writer.build_index(tmp_path / "data.idx")
    return str(tmp_path / "data")


def test_every_token_but_the_first_is_trained_once(prefix):
    windows = DocumentWindows(prefix, 3)
    assert len(windows) == 3
    found = [windows[number] for number in range(3)]
    assert [w["input_ids"].tolist() for w in found] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [w["labels"].tolist() for w in found] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert len(DocumentWindows(prefix, 5)) == 2 and len(DocumentWindows(prefix, 10)) == 1


def test_too_few_tokens_are_an_error(prefix):
    with pytest.raises(ConfigError, match="its 11 tokens are fewer than the 12 of one sample"):
        DocumentWindows(prefix, 11)


def test_files_without_a_token_are_an_error(tmp_path):
    writer = TokenWriter(tmp_path, "data", np.dtype("<u2"))
    writer.append(np.zeros(0, int), np.zeros(0, int), np.array([0]))
    writer.build_index(tmp_path / "data.idx")
    with pytest.raises(ConfigError, match="its 0 tokens are fewer than the 4 of one sample"):
        DocumentWindows(str(tmp_path / "data"), 3)
