"""Commands that the README and the guides show are run; links and paths that they name exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL_PAGES = [*PAGES, ROOT / "AGENTS.md", ROOT / "CHANGELOG.md"]
ALL_PAGES += sorted([*(ROOT / "docs").glob("*/*.md"), *(ROOT / "examples").glob("**/*.md")])
TRAIN = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


def commands():
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                yield page.relative_to(ROOT).as_posix(), line.partition("  #")[0].strip()


@pytest.mark.parametrize("page, command", sorted(set(commands())))
def test_a_shown_command_works(page, command, tmp_path):
    program, *arguments = shlex.split(command)
    if program == "make":  # what these do is this test session, or ends with the next test
        [target] = arguments
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    assert program == "mindspeed", f"{page} shows a command that no test runs"
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def links(text):
    return re.findall(r"\]\((?!http)([^)#]+)", text)


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_named_files_exist(page):
    text = page.read_text()
    for link in links(text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for path in re.findall(
        r"`((?:tests|docs|examples|benchmarks|scripts|mindspeed)/[\w./-]+)`", text
    ):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_a_reader_of_the_readme_finds_every_page():
    found, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop().resolve()
        page = page / "README.md" if page.is_dir() else page
        if page.suffix == ".md" and page.is_file() and page not in found:
            found.add(page)
            ahead += [page.parent / link for link in links(page.read_text())]
    assert set(ALL_PAGES) - found == {ROOT / "AGENTS.md"}
