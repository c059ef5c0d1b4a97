"""`mindspeed-mm plan`: show how FSDP2 options shard a model, without starting ranks."""

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
    from mindspeed.fsdp.plan import PlanRow

ADAMW_STATES = 2


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="show what is sharded, recomputed, ignored and prefetched, and bytes per rank",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("config", help="YAML file of FSDP2 options, or of a run")
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
    """Print the tree, the order of all-gathers and the bytes per rank."""
    from mindspeed.fsdp.plan import describe, make_plan

    options, build_model = _read(args.config, args.model)
    ranks = _ranks(options) if args.ranks is None else args.ranks
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks} is too small: it must be at least 1")
    sys.path.insert(0, os.getcwd())  # unlike a script, a command does not import from there
    model = build_model()
    try:
        plan = make_plan(model, options, ranks)
    except ConfigError as error:
        raise ConfigError(f"{args.config}: {error}") from None
    print("\n".join([*_tree(describe(model, plan)), "", *_summary(plan)]))
    return 0


def _read(path: str, model: str | None) -> "tuple[FsdpOptions, Callable[[], nn.Module]]":
    """Return the options and a model builder from an FSDP2 file or the file of a run."""
    from mindspeed.config import load_yaml
    from mindspeed.config.yaml_file import read_yaml
    from mindspeed.fsdp import FsdpOptions
    from mindspeed_mm.models.meta_device import build_configured_meta_model, build_meta_model

    if is_one_file(read_yaml(path)):
        options, section = read_for_plan(path)
        if section is not None and model is None:
            return options, lambda: build_configured_meta_model(section)
    else:
        options = load_yaml(path, FsdpOptions)
    source = model or options.model
    if source is None:
        raise ConfigError(f"{path} names no model: add `model: ...` or give --model")
    return options, lambda: build_meta_model(source)


def _ranks(options: "FsdpOptions") -> int:
    import mindspeed.device

    minimum = 1 if options.sharding_size == "auto" else options.sharding_size
    return max(mindspeed.device.current().count(), minimum)


def _tree(rows: "list[PlanRow]") -> Iterator[str]:
    cells = [("module", "applied", "parameters", "bytes per rank"), *map(_cells, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    for name, mark, count, size in cells:
        yield f"{name:<{widths[0]}}  {mark:<{widths[1]}}  {count:>{widths[2]}}  {size:>{widths[3]}}"


def _cells(row: "PlanRow") -> tuple[str, str, str, str]:
    name = f"{'  ' * row.depth}{row.name or '(root)'}: {row.kind}"
    # Modules inside a unit are counted with that unit.
    size = _bytes(row.bytes_per_rank) if row.bytes_per_rank else ""
    return name, ", ".join(row.marks), f"{row.parameters:,}", size


def _summary(plan: "Plan") -> Iterator[str]:
    from mindspeed.fsdp import fold

    options = plan.options
    yield f"mesh                {plan.replicas} x {plan.shards} (replicas x shards)"
    dtypes = {"compute": options.param_dtype, "reduce": options.reduce_dtype}
    dtypes["reduce"] = dtypes["reduce"] or dtypes["compute"]
    yield "dtypes              " + ", ".join(f"{k} {v or 'as loaded'}" for k, v in dtypes.items())
    after = {True: "resharded (ZeRO-3)", False: "kept (ZeRO-2)"}
    reshard = options.reshard_after_forward
    kept = after[reshard] if isinstance(reshard, bool) else f"resharded to {reshard} ranks"
    yield f"after forward       {kept}"
    yield f"all-gather order    {', '.join(fold(plan.forward_order)) or 'the root only'}"
    forward, backward = options.num_to_forward_prefetch, options.num_to_backward_prefetch
    yield f"prefetch            {forward} forward, {backward} backward"
    trainable = sum(unit.trainable_bytes for unit in plan.units)
    where = "in host memory" if options.offload_to_cpu else "on the device"
    weights = _bytes(plan.bytes_per_rank)
    yield f"memory per rank     weights {weights}, gradients {_bytes(trainable)},"
    yield f"                    AdamW {_bytes(ADAMW_STATES * trainable)}, {where}"
    largest = max(plan.units, key=lambda unit: unit.gathered_bytes)
    yield f"largest all-gather  {_bytes(largest.gathered_bytes)} ({largest.name or 'the root'})"
    if plan.trainable_ignored:
        yield f"must be frozen      {', '.join(fold(plan.trainable_ignored))}"
        yield "                    (ignored but trainable: freeze before sharding)"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:,.2f} {unit}"
