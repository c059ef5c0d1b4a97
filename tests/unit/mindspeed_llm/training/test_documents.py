"""Windows over the tokens of documents."""

import json
from pathlib import Path

import numpy as np
import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.data.indexed import IGNORE_INDEX, TokenWriter
from mindspeed_llm.training.documents import DocumentWindows, ends_with_stop_token, open_documents


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


def test_separate_documents_are_numbered_and_do_not_predict_each_other(tmp_path):
    writer = TokenWriter(tmp_path, "data", np.dtype("<u2"))
    lengths = np.array([4, 0, 1, 7, 2])
    writer.append(np.arange(14), lengths)
    writer.build_index(tmp_path / "data.idx")
    windows = DocumentWindows(str(tmp_path / "data"), 5, separate=True)
    first, second = windows[0], windows[1]
    assert first["input_ids"].tolist() == [0, 1, 2, 3, 4]
    assert first["labels"].tolist() == [1, 2, 3, IGNORE_INDEX, IGNORE_INDEX]
    assert first["attention_mask"].tolist() == [1, 1, 1, 1, 2]
    assert second["labels"].tolist() == [6, 7, 8, 9, 10], "goes on in the next window"
    assert second["attention_mask"].tolist() == [1] * 5
    assert windows.works.tolist() == [4**2 + 1, 5**2]
    assert DocumentWindows(str(tmp_path / "data"), 5).works.tolist() == [25, 25]


@pytest.mark.parametrize(("stop_ids", "expected"), [([3], True), ([5], False), ([], True)])
def test_documents_without_an_end_of_text_token_are_noticed(prefix, stop_ids, expected):
    Path(f"{prefix}.summary.json").write_text(json.dumps({"stop_ids": stop_ids}))
    assert ends_with_stop_token(prefix) is expected


def test_too_few_tokens_are_an_error(prefix):
    with pytest.raises(ConfigError, match="its 11 tokens are fewer than the 12 of one sample"):
        DocumentWindows(prefix, 11)


def test_a_share_without_a_window_names_its_data(prefix):
    path = ["1", prefix, "1", prefix]
    expected = rf"--split: 5 % of the 2 samples of {prefix} are none: give larger shares"
    with pytest.raises(ConfigError, match=expected):
        open_documents(path, 5, seed=0, shuffle=True, part=(0.9, 0.95))


def test_files_without_a_token_are_an_error(tmp_path):
    writer = TokenWriter(tmp_path, "data", np.dtype("<u2"))
    writer.append(np.zeros(0, int), np.zeros(0, int), np.array([0]))
    writer.build_index(tmp_path / "data.idx")
    with pytest.raises(ConfigError, match="its 0 tokens are fewer than the 4 of one sample"):
        DocumentWindows(str(tmp_path / "data"), 3)


def test_a_folder_is_answered_with_the_prefixes_in_it(tmp_path):
    for number in range(12):
        (tmp_path / f"shard_{number:02}_text_document.idx").touch()
    (tmp_path / "chat_packed_input_ids_document.idx").touch()
    with pytest.raises(ConfigError) as error:
        DocumentWindows(str(tmp_path), 3)
    shown = ", ".join(str(tmp_path / f"shard_{number:02}") for number in range(10))
    assert str(error.value).endswith(f"give the prefix of data in it (it holds {shown} and 2 more)")
