"""`mindspeed features`: every switch with its flags and needs, every operator and what runs it."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from mindspeed.config import ConfigError, Spelling
from mindspeed.features.base import Context, Level
from mindspeed.features.registry import registry
from mindspeed.features.selection import Choice, select

if TYPE_CHECKING:
    from mindspeed.ops.dispatch import Op

WIDTH = 100


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "features", help="list every feature", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON for other programs")
    parser.add_argument(
        "--level",
        type=int,
        choices=[int(level) for level in Level],
        default=int(max(Level)),
        help="list what --optimization-level N allows (default: all)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the features as a table or as JSON."""
    # They import torch, which takes seconds: no command's --help needs it.
    from mindspeed import device
    from mindspeed.ops.dispatch import known_ops

    known = registry()
    try:
        choices = select(known, known.options_class(), Context(Spelling.FLAG))
        here = device.current().name
        operators = [_operator(op, here) for op in known_ops().values()]
    # MINDSPEED_DEVICE or MINDSPEED_OPS names what cannot be used here
    except (RuntimeError, ValueError) as error:
        raise ConfigError(str(error)) from None
    listed = [choice for choice in choices if choice.feature.level <= args.level]
    listed.sort(key=lambda choice: (choice.feature.group, choice.feature.level))
    if args.json:
        features = [_as_dict(choice) for choice in listed]
        print(json.dumps({"features": features, "ops": operators}, indent=2))
        return 0
    console = Console(width=WIDTH, highlight=False)
    with console.capture() as text:  # rich exits with 1 when the reader closes the pipe
        console.print(_table(listed))
        console.print(_operator_table(operators, here))
    print(text.get())
    print("here: on without a flag; - is decided by Megatron's arguments.")
    print("What each does: docs/features/<feature>.md")
    print(
        "MINDSPEED_OPS=op=implementation,... forces another; how fast each is: docs/performance.md"
    )
    return 0


def _table(choices: list[Choice]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("feature", no_wrap=True, width=28)
    table.add_column("level", width=5)
    table.add_column("here", width=4)
    table.add_column("flags, needs and conflicts", width=54)
    for group, members in itertools.groupby(choices, key=lambda choice: choice.feature.group):
        table.add_row()
        table.add_row(f"[bold]{group}[/bold]")
        for choice in members:
            level = str(int(choice.feature.level))
            table.add_row(
                f"  {choice.feature.name}", level, choice.state, "\n".join(_facts(choice))
            )
    return table


def _facts(choice: Choice) -> Iterator[str]:
    feature = choice.feature
    yield from feature.flags or (feature.title,)
    if feature.requires:
        yield f"needs {', '.join(feature.requires)}"
    if feature.conflicts:
        yield f"not with {', '.join(feature.conflicts)}"
    if not choice.on and not feature.flags:
        yield choice.why


def _operator_table(operators: list[dict[str, str]], device_name: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(f"\noperator on {device_name}", no_wrap=True, width=35)
    table.add_column("\nruns", width=10)
    table.add_column("\nwhy not a faster one", width=47)
    for operator in operators:
        table.add_row(*operator.values())
    return table


def _operator(op: Op, device_name: str) -> dict[str, str]:
    choice = op.choice(device_name)
    why = "; ".join(choice.obstacles)
    if not why and not any(impl.device == device_name for impl in op.impls):
        others = [f"{impl.name} is for {impl.device}" for impl in op.impls]
        why = ", ".join(others) or "it is torch on every device"
    return {"name": op.name, "implementation": choice.name, "why": why}


def _as_dict(choice: Choice) -> dict[str, object]:
    feature = choice.feature
    return {
        "name": feature.name,
        "title": feature.title,
        "group": feature.group,
        "level": int(feature.level),
        "flags": list(feature.flags),
        "requires": list(feature.requires),
        "conflicts": dict(feature.conflicts),
        "devices": list(feature.devices),
        "on": choice.on,
        "why": choice.why,
        "docs": feature.docs,
    }
