"""The commands of the page on preferences, and of the example, with a random model."""

import json
import runpy
from pathlib import Path

import pytest

from tests.commands import ROOT, run_page

PAGE, EXAMPLE = ROOT / "docs/llm/preferences.md", ROOT / "examples/dpo/README.md"
RECORDS = {
    "pairs.jsonl": {"instruction": "Who are you?", "chosen": "A fox.", "rejected": "A dog."},
    "judged.jsonl": {"prompt": "Who are you?", "completion": "A fox.", "label": True},
    "steps.jsonl": {"input": "12 + 30x It is 42.x", "value": ["+", "("]},
}


def make_folder(folder: Path, model: str) -> None:
    """Give a folder the files that commands name: a random model, records and examples."""
    get_model = ROOT / "examples/quickstart/get_model.py"
    runpy.run_path(str(get_model))["save_random_model"](folder / model)
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, record in RECORDS.items():
        lines = [json.dumps(record | {"system": f"{number}"}) for number in range(2)]
        (folder / name).write_text("\n".join(lines) + "\n")


def test_every_command_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_folder(tmp_path, "model")
    run_page(PAGE, tmp_path)
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"dpo", "orm", "simpo"}


def test_every_command_of_the_example_works(tmp_path: Path) -> None:
    make_folder(tmp_path, "out/dpo/model")
    run_page(EXAMPLE, tmp_path)
    out = tmp_path / "out/dpo"
    lines = [json.loads(line) for line in (out / "trained/log.jsonl").read_text().splitlines()]
    pairs = lines[0]["lm loss"] - lines[0]["sft loss"]
    assert len(lines) == 20 and pairs == pytest.approx(0.693147, abs=1e-5)
    assert lines[-1]["rewards/margins"] > lines[0]["rewards/margins"] + 1e-4
    questions = (ROOT / "examples/dpo/questions.txt").read_text().splitlines()
    for name in ("before", "after"):
        assert len((out / f"{name}.jsonl").read_text().splitlines()) == len(questions)
    assert (out / "margins.png").read_bytes().startswith(b"\x89PNG")
