"""The load of experts over an interval of steps: counted on the device, read once.

A hook of every router adds its counts to a tensor on the device; a report adds them up over all
ranks by one all-reduce and copies them to the host once, whatever the number of layers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed import device

logger = logging.getLogger(__name__)

STARVING = 0.05
"""Part of an even share below which an expert starves."""
TRAINED = "raise the coefficient of the auxiliary loss or lower the learning rate"
"""What helps where routers are trained."""
ENOUGH = 50
"""Tokens of an even share below which a small load says nothing."""


@dataclass(frozen=True)
class LayerLoad:
    """What the router of one layer did over an interval."""

    layer: int
    """Number of the layer, from 1 on."""
    counts: tuple[int, ...]
    """Tokens that each expert computed."""
    num_pairs: int
    """Pairs of token and expert that the router chose."""

    @property
    def shares(self) -> list[float]:
        """The load of each expert as a multiple of an even share."""
        even = max(1, sum(self.counts)) / len(self.counts)
        return [count / even for count in self.counts]

    @property
    def drop_rate(self) -> float:
        """The part of the chosen pairs that no expert computed."""
        return 1 - sum(self.counts) / max(1, self.num_pairs)

    @property
    def entropy(self) -> float:
        """The entropy of the load: 1 where it is even, 0 where one expert gets all tokens."""
        parts = [share / len(self.counts) for share in self.shares if share]
        return -sum(part * math.log(part) for part in parts) / math.log(max(2, len(self.counts)))

    @property
    def starving(self) -> list[int]:
        """The experts with far less than an even share, where there were tokens enough."""
        if self.num_pairs < ENOUGH * len(self.counts):
            return []
        return [expert for expert, share in enumerate(self.shares) if share < STARVING]


@dataclass(frozen=True)
class LoadRead:
    """Counts of all layers on their way to the host."""

    copy: Tensor
    done: Any
    """The event that the copy is complete."""

    def wait(self) -> list[LayerLoad]:
        """Return the loads of the layers that had tokens, the same on every rank."""
        self.done.synchronize()
        rows = enumerate(self.copy.tolist(), 1)
        return [LayerLoad(layer, tuple(row[:-1]), row[-1]) for layer, row in rows if row[-1]]


class LoadMonitor:
    """Counts the tokens of every expert of a model.

    Args:
        chunks: this rank's parts of the model.
        num_layers: layers of the whole model; those of multi-token prediction are not counted.
    """

    def __init__(self, chunks: Iterable[nn.Module], num_layers: int) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        self._num_layers = num_layers
        self._sums: dict[int, Tensor] = {}
        self._has_warned = False
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, TopKRouter) and "mtp" not in name.split("."):
                    module.register_forward_hook(self._count)

    def _count(self, router: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        # A layer that is recomputed runs twice, once without gradients; evaluation runs without.
        if not (router.training and torch.is_grad_enabled()):
            return
        probs, mask = output
        if router.config.moe_pad_expert_input_to_capacity:  # padding is in the mask, without weight
            mask = mask & (probs > 0)
        pairs = mask.new_full((1,), len(mask) * router.config.moe_router_topk, dtype=torch.int64)
        counts = torch.cat([mask.sum(0), pairs])
        total = self._sums.get(router.layer_number)
        self._sums[router.layer_number] = counts if total is None else total.add_(counts)

    def start_read(self, num_experts: int) -> LoadRead:
        """Queue the sum over all ranks of the loads since the last call, and start from zero."""
        here = device.current()
        size = self._num_layers, num_experts + 1
        table = torch.zeros(size, dtype=torch.int64, device=here.torch_device)
        for layer, counts in self._sums.items():
            table[layer - 1] = counts
        self._sums.clear()
        dist.all_reduce(table)
        copy = here.host_buffer(table.nbytes).view(table.dtype).view(size)
        copy.copy_(table, non_blocking=True)
        return LoadRead(copy, here.current_stream().record_event())

    def warn_once(self, loads: list[LayerLoad], iteration: int, advice: str = TRAINED) -> None:
        """Name the layers whose experts starve, once a run, and say what to do."""
        starving = {load.layer: load.starving for load in loads if load.starving}
        if self._has_warned or not starving:
            return
        self._has_warned = True
        layer, experts = max(starving.items(), key=lambda item: len(item[1]))
        logger.warning(
            "experts starve at iteration %d in layers %s; in layer %d experts %s get less than "
            "%d%% of an even share: %s",
            iteration,
            ", ".join(map(str, starving)),
            layer,
            ", ".join(map(str, experts)),
            round(100 * STARVING),
            advice,
        )


def summary(loads: list[LayerLoad]) -> dict[str, float]:
    """Return the numbers of a log line over all layers."""
    return {
        "moe load entropy": sum(load.entropy for load in loads) / len(loads),
        "moe max load": max(max(load.shares) for load in loads),
        "moe min load": min(min(load.shares) for load in loads),
        "moe drop rate": sum(load.drop_rate for load in loads) / len(loads),
    }


def by_layer(loads: list[LayerLoad]) -> dict[str, float]:
    """Return the numbers of each layer for boards with a curve for each name."""
    named: dict[str, float] = {}
    for load in loads:
        named[f"moe load entropy/layer {load.layer}"] = load.entropy
        named[f"moe max load/layer {load.layer}"] = max(load.shares)
        named[f"moe drop rate/layer {load.layer}"] = load.drop_rate
    return named
