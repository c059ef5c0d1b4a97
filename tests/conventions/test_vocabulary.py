"""Names and texts use the words of the field; some that are not are listed with a replacement."""

import re
import subprocess

from tests.conventions.source import ROOT, assert_none

INSTEAD = {
    "anew": "again, or: rewrite, rebuild",
    "crew": "ranks",
    "learnt": "trained",
    "nobody": "no rank, no caller, unused",
    "stumble": "fail on",
    "stumbled": "failed on",
    "stumbles": "fails on",
    "tells of": "reports, describes",
    "told": "reported, warned, named",
    "trouble": "problem, failure",
    "whoever": "the caller, the user",
    "wish": "request",
    "wishes": "requests",
}
STORED = {
    'FILE_KEYS = {"trained": "learnt"}': "a key of stored summary files",
}
WORDS = re.compile(rf"(?<![a-z])({'|'.join(INSTEAD)})(?![a-z])", re.IGNORECASE)
FILES = ("*.py", "*.md", "*.yaml", "*.yml", "*.toml", "*.csv", "*.txt", "Makefile")


def found():
    listed = subprocess.run(
        ["git", "ls-files", "-z", *FILES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if name == "tests/conventions/test_vocabulary.py" or not (ROOT / name).is_file():
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            if line in STORED:
                continue
            for word in WORDS.findall(line):
                yield f"{name}:{number}: {word} ({INSTEAD[word.lower()]}): {line.strip()[:80]}"


def test_words_of_the_field():
    assert_none(found())
