"""Write the results of megatron_suite.py into docs/megatron_suite.md.

    python scripts/megatron_suite_report.py docs/megatron_suite.md core_v0.12.1=FILE ...

Everything from the heading "Result" on is replaced.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any

from megatron_inputs import page, tagged
from megatron_suite_rank import matches, read_reasons

KINDS = ("passed", "failed", "skipped", "left out")
HEADING = "## Result"
CAUSES = Path(__file__).with_name("megatron_suite_causes.txt")
"""Known causes of failures, where the error message does not explain them."""
Test = dict[str, Any]


def main() -> int:
    """Update the page with the results of the TAG=FILE arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=page, help="the page to update")
    parser.add_argument("results", type=tagged, nargs="+", metavar="TAG=FILE")
    options = parser.parse_args()
    tags = {tag: by_name(files) for tag, files in options.results}
    introduction = options.page.read_text().partition(HEADING)[0]
    options.page.write_text(introduction + "\n".join(sections(tags)).rstrip() + "\n")
    return 0


def sections(tags: dict[str, dict[str, Test]]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield f"{HEADING}\n"
    yield from summary(tags)
    yield "\n## By folder\n"
    yield from by_folder(tags)
    for title, kind in (("Left out", "left out"), ("Skipped by the test itself", "skipped")):
        yield f"\n## {title}\n"
        yield from by_cause(tags, kind)
    yield "\n## Failures\n"
    yield from failures(tags)


def by_name(files: dict[str, dict[str, Test]]) -> dict[str, Test]:
    """Return the tests of all files that were run."""
    names = (item for tests in files.values() for item in tests.items())
    return {
        name.removeprefix("tests/unit_tests/"): test
        for name, test in names
        if test["outcome"] in KINDS
    }


def summary(tags: dict[str, dict[str, Test]]) -> Iterator[str]:
    """Count the tests and the share of those run that passed."""
    yield "| tag | tests | passed | failed | skipped by itself | left out | share that passed |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for tag, tests in tags.items():
        count = Counter(test["outcome"] for test in tests.values())
        ran = count["passed"] + count["failed"]
        parts = [f"{count[kind]} ({count[kind] / len(tests):.1%})" for kind in KINDS]
        yield f"| {tag} | {len(tests)} | {' | '.join(parts)} | {count['passed'] / ran:.1%} |"


def by_folder(tags: dict[str, dict[str, Test]]) -> Iterator[str]:
    """Count the results of each folder at each tag."""
    titles = " | ".join(f"{tag}: passed / failed / skipped / left out" for tag in tags)
    yield f"| folder | {titles} |"
    yield "| --- |" + " --- |" * len(tags)
    counts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for tag, tests in tags.items():
        for name, test in tests.items():
            folder = str(PurePath(name.partition("::")[0]).parent)
            counts["(top)" if folder == "." else folder][tag][test["outcome"]] += 1
    for folder, of_tag in sorted(counts.items()):
        cells = [" / ".join(str(of_tag[tag][kind]) for kind in KINDS) for tag in tags]
        yield f"| {folder} | {' | '.join(cells)} |"


def by_cause(tags: dict[str, dict[str, Test]], kind: str) -> Iterator[str]:
    """Count the tests of one kind by reason."""
    yield "| reason | " + " | ".join(tags) + " |"
    yield "| --- |" + " --- |" * len(tags)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for tag, tests in tags.items():
        for test in tests.values():
            if test["outcome"] == kind:
                counts[_short(test["cause"])][tag] += 1
    for cause, of_tag in sorted(counts.items(), key=lambda item: -sum(item[1].values())):
        yield f"| {cause} | {' | '.join(str(of_tag[tag]) for tag in tags)} |"


def failures(tags: dict[str, dict[str, Test]]) -> Iterator[str]:
    """List every test that failed, grouped by function and cause."""
    known = dict(read_reasons(CAUSES))
    for tag, tests in tags.items():
        yield f"### {tag}\n"
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, test in tests.items():
            if test["outcome"] == "failed":
                function, _, case = name.partition("[")
                why = next((why for each, why in known.items() if matches(name, each)), None)
                groups[function, why or _short(test["cause"])].append(case.rstrip("]"))
        for (function, cause), cases in sorted(groups.items()):
            yield f"- `{function}`{_cases(cases)}: {cause}"
        yield ""


def _cases(cases: Iterable[str]) -> str:
    named = [case for case in cases if case]
    if not named:
        return ""
    return f" [{named[0]}]" if len(named) == 1 else f" ({len(named)} cases)"


def _short(cause: str) -> str:
    text = re.sub(r"\s+", " ", cause).replace("|", "/")
    return text if len(text) <= 200 else text[:197] + "..."


if __name__ == "__main__":
    sys.exit(main())
