"""Files of JSON lines: what a resumed run keeps, and texts of any kind."""

import json
from pathlib import Path

import pytest

from mindspeed.training.json_lines import JsonLines


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_a_resumed_run_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.jsonl"
    lines = JsonLines(path)
    lines.start(0)
    lines.append({"iteration": 1}, {"iteration": 1, "text": "好"}, {"iteration": 2})
    with path.open("ab") as file:  # killed in the middle of a letter
        file.write('{"iteration": 1, "text": "好'.encode()[:-1])
    lines.start(1)
    assert read(path) == [{"iteration": 1}, {"iteration": 1, "text": "好"}]
    lines.append({"iteration": 2, "text": "again"})
    assert len(read(path)) == 3
    lines.start(0)
    assert read(path) == []


@pytest.mark.parametrize("text", ["好", "two\nlines\u2028or three\r", "half of a pair: \ud83d"])
def test_texts_come_back_as_they_were(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path)
    lines.append({"iteration": 1, "text": text})
    lines.start(1)
    assert read(path) == [{"iteration": 1, "text": text}]
    assert ("好" in path.read_text(encoding="utf-8")) == ("好" in text)


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    JsonLines(tmp_path).append({"iteration": 1})  # a folder
    assert f"{tmp_path}: no line is written" in caplog.text
