"""`mindspeed-mm plan`: what a file of FSDP2 options does to a model, without starting ranks."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.config import ConfigError
from mindspeed_mm.training.arguments import is_one_file, read_for_plan

if TYPE_CHECKING:
    from torch import nn

    from mindspeed.fsdp import FsdpOptions, Plan
    from mindspeed.fsdp.describe import Line

ADAMW_STATES = 2


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="show what is sharded, recomputed, ignored and prefetched, and bytes per rank",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("config", help="YAML file of the FSDP2 options, or of a run")
    parser.add_argument(
        "--model",
        metavar="TEXT",
        help="package.module:function or a Hugging Face folder (default: the model of the file)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks to plan for (default: the devices here, and at least sharding_size)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the tree, the order of gathers and the bytes."""
    from mindspeed.fsdp import make_plan
    from mindspeed.fsdp.describe import describe

    options, build_model = _read(args.config, args.model)
    ranks = _ranks(options) if args.ranks is None else args.ranks
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks} is too small: it must be at least 1")
    sys.path.insert(0, os.getcwd())  # a command, unlike a script, does not look where it is run
    model = build_model()
    try:
        plan = make_plan(model, options, ranks)
    except ConfigError as error:
        raise ConfigError(f"{args.config}: {error}") from None
    print("\n".join([*_tree(describe(model, plan)), "", *_summary(plan)]))
    return 0


def _read(path: str, model: str | None) -> "tuple[FsdpOptions, Callable[[], nn.Module]]":
    """Return the options, and what builds the model, of a file of options or of a whole run."""
    from mindspeed.config import load_yaml
    from mindspeed.config.yaml_file import read_yaml
    from mindspeed.fsdp import FsdpOptions
    from mindspeed_mm.models.skeleton import build_skeleton, trained_skeleton

    if is_one_file(read_yaml(path)):
        options, section = read_for_plan(path)
        if section is not None and model is None:
            return options, lambda: trained_skeleton(section)
    else:
        options = load_yaml(path, FsdpOptions)
    source = model or options.model
    if source is None:
        raise ConfigError(f"{path} names no model: add `model: ...` or give --model")
    return options, lambda: build_skeleton(source)


def _ranks(options: "FsdpOptions") -> int:
    import mindspeed.device

    asked = 1 if options.sharding_size == "auto" else options.sharding_size
    return max(mindspeed.device.current().count(), asked)


def _tree(lines: "list[Line]") -> Iterator[str]:
    rows = [("module", "what", "parameters", "a rank keeps"), *map(_row, lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, what, count, held in rows:
        yield f"{name:<{widths[0]}}  {what:<{widths[1]}}  {count:>{widths[2]}}  {held:>{widths[3]}}"


def _row(line: "Line") -> tuple[str, str, str, str]:
    name = f"{'  ' * line.depth}{line.name or '(root)'}: {line.kind}"
    # What lies in a unit around it is kept with that unit.
    held = _bytes(line.held) if line.held else ""
    return name, ", ".join(line.marks), f"{line.parameters:,}", held


def _summary(plan: "Plan") -> Iterator[str]:
    from mindspeed.fsdp import fold

    options = plan.options
    yield f"ranks               {plan.replicas} x {plan.shards} (copies of the model x shards)"
    types = {"compute": options.param_dtype, "reduce": options.reduce_dtype}
    types["reduce"] = types["reduce"] or types["compute"]
    yield "types               " + ", ".join(f"{k} {v or 'as loaded'}" for k, v in types.items())
    after = {True: "freed (ZeRO-3)", False: "kept (ZeRO-2)"}
    reshard = options.reshard_after_forward
    kept = after[reshard] if isinstance(reshard, bool) else f"1/{reshard} kept"
    yield f"after the forward   {kept}"
    yield f"gathered in turn    {', '.join(fold(plan.order)) or 'the root only'}"
    forward, backward = options.num_to_forward_prefetch, options.num_to_backward_prefetch
    yield f"gathered ahead      {forward} forward, {backward} backward"
    trained = sum(unit.trained for unit in plan.units)
    where = "in host memory" if options.offload_to_cpu else "on the device"
    yield f"a rank keeps        weights {_bytes(plan.held)}, gradients {_bytes(trained)},"
    yield f"                    AdamW {_bytes(ADAMW_STATES * trained)}, {where}"
    largest = max(plan.units, key=lambda unit: unit.gathered)
    yield f"largest gather      {_bytes(largest.gathered)} ({largest.name or 'the root'})"
    if plan.trained_ignored:
        yield f"to freeze           {', '.join(fold(plan.trained_ignored))}"
        yield "                    (ignored, but trained: freeze before sharding)"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:,.2f} {unit}"
