"""Links and paths on documentation pages exist, every page is reachable, both READMEs agree."""

import re

from tests.conventions.source import ROOT, assert_none

READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
NAMED = re.compile(
    r"`((?:tests|docs|examples|benchmarks|scripts|mindspeed|mindspeed_llm|mindspeed_mm)/[\w./-]+)`"
)


def links(text):
    return re.findall(r"\]\((?!http)([^)#]+)", text)


def missing():
    for page in PAGES:
        text, where = page.read_text(encoding="utf-8"), page.relative_to(ROOT)
        for link in links(text):
            if not (page.parent / link).exists():
                yield f"{where} links to {link}"
        for path in NAMED.findall(text):
            if not (ROOT / path).exists():
                yield f"{where} names {path}"


def test_links_and_named_files_exist():
    assert_none(missing())


def merge_marks():
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if line.startswith(("<<<<<<< ", "=======", ">>>>>>> ")):
                yield f"{page.relative_to(ROOT)}:{number}"


def test_no_page_has_merge_marks():
    assert_none(merge_marks())


def test_every_page_is_linked_from_the_readme():
    found, queue = set(), [ROOT / "README.md"]
    while queue:
        page = queue.pop().resolve()
        page = page / "README.md" if page.is_dir() else page
        if page.suffix == ".md" and page.is_file() and page not in found:
            found.add(page)
            queue += [page.parent / link for link in links(page.read_text(encoding="utf-8"))]
    assert set(PAGES) - found == {ROOT / "AGENTS.md"}


def test_both_readmes_show_the_same():
    """Translated prose aside: the same numbers, commands and links."""
    english, chinese = (page.read_text(encoding="utf-8") for page in READMES)
    assert [link for link in links(english) if link != "README.zh.md"] == [
        link for link in links(chinese) if link != "README.md"
    ]
    for pattern in (r"\d\d,\d{3}", r"\d\.\d\d x", r"(?m)^(?:make|pip|mindspeed) [^#\n]*"):
        assert re.findall(pattern, english) == re.findall(pattern, chinese), pattern
