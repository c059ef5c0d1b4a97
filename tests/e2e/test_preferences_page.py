"""The commands of the page on preferences, and of the example, with a random model."""

import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from mindspeed.launch import call

ROOT = Path(__file__).resolve().parents[2]
PAGE, EXAMPLE = ROOT / "docs/llm/preferences.md", ROOT / "examples/dpo/README.md"
SCRIPTS = {
    "preprocess_data.py": "preprocess",
    "posttrain_gpt.py": "posttrain",
    "convert_ckpt.py": "convert",
    "inference.py": "generate",
}
RECORDS = {
    "pairs.jsonl": {"instruction": "Who are you?", "chosen": "A fox.", "rejected": "A dog."},
    "judged.jsonl": {"prompt": "Who are you?", "completion": "A fox.", "label": True},
    "steps.jsonl": {"input": "12 + 30x It is 42.x", "value": ["+", "("]},
}


def run_commands(page: Path, folder: str) -> None:
    """Run the commands of a page in this process, as the only rank."""
    from mindspeed_llm.cli.main import main

    os.chdir(folder)
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line)
            if program == "mindspeed":
                assert arguments[:3] == ["run", "--nproc", "2"]
                program, arguments = "python", arguments[3:]
            if program == "mindspeed-llm":
                command = arguments
            elif arguments[0] in SCRIPTS:
                command = [SCRIPTS[arguments[0]], *arguments[1:]]
            else:
                sys.argv = arguments
                runpy.run_path(arguments[0], run_name="__main__")
                continue
            assert main(command) == 0, line


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
    call(run_commands, 1, PAGE, str(tmp_path), timeout=300, preload=["tests.preload"])
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"dpo", "orm", "simpo"}


def test_every_command_of_the_example_works(tmp_path: Path) -> None:
    make_folder(tmp_path, "out/dpo/model")
    call(run_commands, 1, EXAMPLE, str(tmp_path), timeout=300, preload=["tests.preload"])
    out = tmp_path / "out/dpo"
    lines = [json.loads(line) for line in (out / "trained/log.jsonl").read_text().splitlines()]
    pairs = lines[0]["lm loss"] - lines[0]["sft loss"]
    assert len(lines) == 20 and pairs == pytest.approx(0.693147, abs=1e-5)
    assert lines[-1]["rewards/margins"] > lines[0]["rewards/margins"] + 1e-4
    questions = (ROOT / "examples/dpo/questions.txt").read_text().splitlines()
    for name in ("before", "after"):
        assert len((out / f"{name}.jsonl").read_text().splitlines()) == len(questions)
    assert (out / "margins.png").read_bytes().startswith(b"\x89PNG")
