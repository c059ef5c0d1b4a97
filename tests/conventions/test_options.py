"""Every option of the three packages is in options.txt, so that a change shows in a review.

`python -m tests.conventions.test_options` writes the file.
"""

import argparse
import importlib
import re
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from mindspeed.cli.main import build_parser
from mindspeed.config import Options, add_flags
from mindspeed.features.registry import registry
from mindspeed.fsdp import FsdpOptions
from mindspeed_mm.data.options import DataConfig
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.training.profile import ToolConfig

SNAPSHOT = Path(__file__).with_name("options.txt")
PACKAGES = ("mindspeed", "mindspeed_llm", "mindspeed_mm")
SECTIONS = {
    "fsdp2_config": FsdpOptions,
    "data": DataConfig,
    "model": ModelConfig,
    "tool": ToolConfig,
}
"""Sections of the multimodal suite's YAML file."""


def actions() -> Iterator[tuple[str, argparse.Action]]:
    """Yield every flag and argument with the feature or command that it belongs to."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, registry().options_class)
    owners = {field: feature.name for feature in registry() for field in feature.fields}
    for action in parser._actions:
        yield owners.get(action.dest, "common"), action
    own = {flag for action in parser._actions for flag in action.option_strings}
    for name in PACKAGES:
        commands = build_parser(package=importlib.import_module(f"{name}.cli"))
        for sub in commands._subparsers._group_actions[0].choices.values():
            for action in sub._actions:
                if not own & set(action.option_strings) and action.dest != "help":
                    yield sub.prog, action


def fields(options: type[Options], path: str) -> Iterator[str]:
    """Yield a line for every key below a section of a YAML file."""
    for name, info in options.model_fields.items():
        if nested := _nested(info.annotation):
            yield from fields(nested, f"{path}.{name}")
        else:
            default = info.get_default(call_default_factory=True)
            kind = info.annotation
            takes = kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")
            yield f"{path}.{name} | {takes} | {default!r}"


def _nested(annotation: object) -> type[Options] | None:
    """Return the options class of an annotation, optional or not."""
    kinds = (annotation, *typing.get_args(annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Options)), None)


def snapshot() -> str:
    """Write one line an option: its forms, what it takes, its default and who has it."""
    owners = defaultdict(set)
    for owner, action in actions():
        takes = ",".join(map(str, action.choices)) if action.choices else action.metavar or ""
        forms = "/".join(action.option_strings) or action.dest
        owners[" | ".join((forms, takes, _default(action)))].add(owner)
    lines = [f"{line} | {', '.join(sorted(names))}" for line, names in owners.items()]
    lines += [line for path, options in SECTIONS.items() for line in fields(options, path)]
    return "\n".join(sorted(lines)) + "\n"


def _default(action: argparse.Action) -> str:
    """Return the default: commands leave it to their options class and show it in the help."""
    if action.default != argparse.SUPPRESS:
        return repr(action.default)
    shown = re.search(r"\(default: (.*)\)$", action.help or "")
    return shown[1] if shown else ""


def test_options_are_the_written_ones():
    assert SNAPSHOT.read_text() == snapshot(), __doc__


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot())
