"""Ctrl-C ends a command with exit code 130 and no traceback, also while the command is loaded."""

import subprocess
import sys

import pytest

from mindspeed_llm.cli.main import main
from mindspeed_llm.data import preprocess as run
from tests.small_tokenizers import byte_level

INTERRUPTED = 130
WHILE_LOADING = """
import importlib, sys

class Interrupt:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
main = importlib.import_module(f"{sys.argv[2]}.cli.main").main
sys.exit(main(sys.argv[3:]))
"""
PREPROCESS = ("mindspeed_llm", "preprocess", "--input", "a.jsonl", "--output-prefix", "out")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("pydantic", PREPROCESS),
        ("mindspeed_llm.cli.preprocess", PREPROCESS),
        ("mindspeed_llm.data.preprocess", PREPROCESS),
        ("pydantic", ("mindspeed_mm", "plan", "a.yaml")),
        ("mindspeed_mm.cli.plan", ("mindspeed_mm", "plan", "a.yaml")),
        ("mindspeed.cli.features", ("mindspeed", "features")),
    ],
)
def test_interrupts_while_the_command_loads(module, words):
    command = [sys.executable, "-c", WHILE_LOADING, module, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "")


def test_interrupted_preprocessing_names_the_way_to_resume(tmp_path, monkeypatch, caplog):
    byte_level().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    words = ["preprocess", "--input", str(tmp_path / "a.jsonl")]
    words += ["--tokenizer-name-or-path", str(tmp_path / "tokenizer")]
    words += ["--output-prefix", str(tmp_path / "out"), "--cache-dir", str(tmp_path / "cache")]

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "finalize", interrupt)
        assert main(words) == INTERRUPTED
    assert f"the same command resumes from {tmp_path / 'out.partial'}" in caplog.text
    assert not list(tmp_path.glob("*_document.*"))
    assert main(words) == 0
    assert len(list(tmp_path.glob("*_document.*"))) == 2
