"""Wrong arguments of the scripts that run Megatron's tests: one line, exit code 2, nothing lost."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["megatron_suite.py", "nowhere"], "nowhere is no checkout of Megatron-LM"),
        (["megatron_scripts.py", "nowhere"], "nowhere is no checkout of Megatron-LM"),
        (["megatron_suite.py", ".", "--output", "half.json"], "half.json: cannot be read"),
        (["megatron_suite.py", ".", "--only", "nope.py"], "no test file is like nope.py"),
        (["megatron_suite_report.py", "page.md", "tag=half.json"], "half.json: cannot be read"),
        (["megatron_suite_report.py", "page.md", "tag"], "give TAG=FILE"),
        (["megatron_suite_report.py", "other.md", "tag=half.json"], "other.md does not exist"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path, arguments, message):
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "tests/unit_tests").mkdir(parents=True)
    for name in ("half.json", "page.md"):
        (tmp_path / name).write_text("{")
    script, *rest = arguments
    command = [sys.executable, "-W", "ignore", str(SCRIPTS / script), *rest]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in (done.stdout + done.stderr).splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert (tmp_path / "page.md").read_text() == (tmp_path / "half.json").read_text() == "{"
