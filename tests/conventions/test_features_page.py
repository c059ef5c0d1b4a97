"""docs/features/README.md lists every feature as it declares itself.

`python -m tests.conventions.test_features_page` rewrites the page.
"""

from itertools import groupby
from pathlib import Path

from mindspeed.features.base import Feature
from mindspeed.features.registry import registry

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features" / "README.md"
_COLUMNS = ["| feature | what it is for | level | switch |", "|---|---|---|---|"]
_HEAD = """# Features

What a user can switch, one page each. `mindspeed features` shows which are on here,
[levels](../levels.md) explains when; what is always on is on [the compat page](../compat.md).
FSDP2 from a YAML file has [a page of its own](fsdp2.md).
"""


def page() -> str:
    """Write a table for each group of features."""
    features = sorted(registry(), key=lambda each: (each.group, each.level, each.name))
    lines = [_HEAD]
    for group, members in groupby(features, key=lambda each: each.group):
        lines += [f"## {group}\n", *_COLUMNS, *map(_row, members), ""]
    return "\n".join(lines)


def _row(feature: Feature) -> str:
    what = (type(feature).__doc__ or "").partition("\n\n")[0]
    link = f"[{feature.title}]({feature.name}.md)"
    return f"| {link} | {' '.join(what.split())} | {int(feature.level)} | {_switch(feature)} |"


def _switch(feature: Feature) -> str:
    devices = ", ".join(feature.default_devices)
    return f"`{feature.flags[0]}`" + (f"; on {devices} without it" if devices else "")


def test_the_page_is_what_the_features_say():
    assert PAGE.read_text() == page(), __doc__


if __name__ == "__main__":
    PAGE.write_text(page())
