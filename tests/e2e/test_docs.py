"""Commands that the README and the guides show are run."""

import re
import shlex
import subprocess
import sys

import pytest

from tests.commands import ROOT, run_command

READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
PAGES = [*READMES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TRAIN = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
RUN = "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\n"


def commands():
    """Return every command with a page that shows it."""
    found = {}
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                found.setdefault(line.partition("  #")[0].strip(), page.relative_to(ROOT))
    return sorted((page.as_posix(), command) for command, page in found.items())


@pytest.mark.parametrize("page, command", commands())
def test_a_shown_command_works(page, command, tmp_path):
    program, *arguments = shlex.split(command)
    if program == "make":  # what these do is this test session, or ends with the next test
        [target] = arguments
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if program == "pip":  # resolved with the extras it names, not installed into this environment
        checked = ["--dry-run", "--no-deps", "--no-build-isolation"]
        pip = [sys.executable, "-m", "pip", *arguments, *checked]
        done = subprocess.run(pip, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and "does not provide the extra" not in done.stderr, done.stderr
        return
    assert program == "mindspeed", f"{page} shows a command that no test runs"
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "run.yaml").write_text(RUN)
    if arguments[0] != "run":
        code, output = run_command(program, *arguments, folder=tmp_path)
        assert code == 0 and output, output
        return
    done = subprocess.run(  # the launcher, which starts processes
        [sys.executable, "-m", "mindspeed", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
