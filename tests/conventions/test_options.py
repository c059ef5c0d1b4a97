"""Every flag is in options.txt, so that a new or changed one shows in a review.

`python -m tests.conventions.test_options` writes the file anew.
"""

import argparse
from pathlib import Path

from mindspeed.config import add_flags
from mindspeed.features.registry import registry

SNAPSHOT = Path(__file__).with_name("options.txt")


def snapshot() -> str:
    """Write one line a flag: its forms, what it takes, its default and its feature."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, registry().options_class)
    owners = {field: feature.name for feature in registry() for field in feature.fields}
    lines = []
    for action in parser._actions:
        takes = ",".join(map(str, action.choices)) if action.choices else action.metavar or ""
        cells = ("/".join(action.option_strings), takes, repr(action.default))
        lines.append(" | ".join([*cells, owners.get(action.dest, "common")]))
    return "\n".join(sorted(lines)) + "\n"


def test_options_are_the_written_ones():
    assert SNAPSHOT.read_text() == snapshot(), __doc__


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot())
