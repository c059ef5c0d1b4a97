"""Memory and pipeline features two at a time: which go together, as the features themselves say.

`python -m tests.memory_pairs` rewrites docs/features/memory_pairs.md.
"""

from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError, Spelling, build
from mindspeed.features.base import Context
from mindspeed.features.registry import registry
from mindspeed.features.selection import select

PAGE = Path(__file__).resolve().parents[1] / "docs" / "features" / "memory_pairs.md"


@dataclass(frozen=True)
class Switch:
    """What a user writes to get a feature."""

    options: dict[str, Any] = field(default_factory=dict)
    megatron: dict[str, Any] = field(default_factory=dict)


def _recompute(**values: Any) -> Switch:
    return Switch(megatron={f"recompute_{name}": value for name, value in values.items()})


PIPELINE = {"pipeline_model_parallel_size": 2}
VIRTUAL = {"num_layers_per_virtual_pipeline_stage": 1, "num_layers": 4}
SWITCHES = {
    "full recompute, block": _recompute(granularity="full", method="block", num_layers=1),
    "full recompute, uniform": _recompute(granularity="full", method="uniform", num_layers=1),
    "selective recompute": _recompute(granularity="selective"),
    "distributed optimizer": Switch(megatron={"use_distributed_optimizer": True}),
    "pipeline": Switch(megatron=PIPELINE),
    "activation recompute": Switch({"recompute_activation_function": True}),
    "norm recompute": Switch({"recompute_norm": True}),
    "swap_attention": Switch({"swap_attention": True}),
    "layer input swap": Switch({"swap_layer_input": True}),
    "recompute without attention": Switch({"recompute_keep_attention": True}),
    "optimizer swap": Switch({"swap_optimizer": True}),
    "parameter reuse": Switch({"reuse_fp32_param": True}),
    "tiled MLP": Switch({"tiled_mlp_size": 5}),
    "tiled loss": Switch({"tiled_loss_size": 7, "linear_cross_entropy": True}),
    "EMA AdamW": Switch({"optimizer_selection": "fused_ema_adamw"}),
    "recompute in advance": Switch({"recompute_in_advance": True}, PIPELINE),
    "recompute in the bubble": Switch({"recompute_in_bubble": True}, PIPELINE | VIRTUAL),
    "zero bubble": Switch({"schedules_method": "zb-h1"}, PIPELINE),
}
ONLY_ASKED = ("recompute in advance", "recompute in the bubble", "zero bubble")
"""What the features say is in the table; their own tests train them."""
NEEDS = {
    "layer input swap": "full recompute, block",
    "recompute without attention": "full recompute, block",
    "recompute in advance": "full recompute, block",
}
"""What a feature is never used without: added where the other of a pair is no recompute."""


def together(*names: str) -> Switch:
    """Return the options of some features, and of what they need."""
    given = [SWITCHES[name] for name in names]
    has_recompute = any("recompute_granularity" in one.megatron for one in given)
    given += [SWITCHES[NEEDS[n]] for n in names if n in NEEDS and not has_recompute]
    options: dict[str, Any] = {}
    megatron: dict[str, Any] = {}
    for one in given:
        options |= one.options
        megatron |= one.megatron
    return Switch(options, megatron)


def refusal(*names: str) -> str | None:
    """Return why features cannot be combined, as a user reads it, or None."""
    switch, registered = together(*names), registry()
    megatron = {"bf16": True, "optimizer": "adam", "world_size": 2} | switch.megatron
    try:
        options = build(registered.options_class, switch.options)
        select(registered, options, Context(Spelling.FLAG, megatron))
    except ConfigError as error:
        return str(error)
    return None


def pairs() -> list[tuple[str, str]]:
    """Return all pairs but those of two kinds of one recompute."""
    kinds = ("full recompute, block", "full recompute, uniform", "selective recompute")
    return [(a, b) for a, b in combinations(SWITCHES, 2) if not (a in kinds and b in kinds)]


def page() -> str:
    """Write the table and the lines of refusals."""
    names, allowed = list(SWITCHES), dict.fromkeys(pairs())
    refused = {pair: text for pair in allowed if (text := refusal(*pair)) is not None}
    lines = [
        "# Which memory features go together\n",
        "Asked of the features themselves, two at a time (`python -m tests.memory_pairs`); every",
        "pair that goes together trains in `tests/distributed/test_memory_pairs.py`, but those",
        f"with {', '.join(ONLY_ASKED[:-1])} and {ONLY_ASKED[-1]}, which are asked only.",
        "Layer input swap and recompute in advance are asked with full recompute.\n",
        f"| | {' | '.join(names[1:])} |",
        "|---" * len(names) + "|",
    ]
    for row in names[:-1]:
        cells = []
        for column in names[1:]:
            pair = (row, column)
            cells.append("refused" if pair in refused else "yes" if pair in allowed else "")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    lines += ["", "What is said:\n", *(f"- {a} + {b}: {t}" for (a, b), t in refused.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
