"""Recompute a layer of experts while its load is uneven.

The counts of a layer's previous forward pass decide: the layer is recomputed if one expert got more
than `scale` times its even share of all pairs of token and expert, and in its first pass. Counts
are summed over all ranks of the pipeline stage while the experts compute, so that all ranks decide
alike before the layer's first collective; a collective that only some ranks repeated would hang.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed import device


class AdaptiveRecompute:
    """The decision of one layer."""

    def __init__(self, scale: float, group: ProcessGroup) -> None:
        self._scale, self._group = scale, group
        self._is_recording = False
        self._sum: tuple[Tensor, dist.Work] | None = None
        self._counts: Tensor | None = None
        self._copied: Any = None

    def is_uneven(self) -> bool:
        """Return whether the last recorded load asks for recompute; without one it does."""
        if self._counts is None:
            return True
        self._copied.synchronize()  # a copy of the previous pass
        *counts, num_pairs = self._counts.tolist()
        return max(counts) * len(counts) > num_pairs * self._scale

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the counts of the pass inside, not those of its repetition in backward."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False
        self._finish()

    def record(self, routing_map: Tensor, topk: int) -> None:
        """Start to add up the counts (tokens, experts) of all ranks."""
        if not self._is_recording:
            return
        num_pairs = routing_map.new_full((1,), len(routing_map) * topk, dtype=torch.int64)
        counts = torch.cat([routing_map.sum(0), num_pairs])
        self._sum = counts, dist.all_reduce(counts, group=self._group, async_op=True)

    def _finish(self) -> None:
        if self._sum is None:
            return
        counts, work = self._sum
        self._sum = None
        work.wait()
        where = device.current()
        if self._counts is None:
            self._counts = where.host_buffer(counts.nbytes).view(torch.int64)
        self._counts.copy_(counts, non_blocking=True)
        self._copied = where.current_stream().record_event()


def wrap_init(original: Callable[..., None], scale: float) -> Callable[..., None]:
    """Give a new layer its decision, and let its router report."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.core import parallel_state

        original(self, *args, **kwargs)
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        decision = self.adaptive_recompute = AdaptiveRecompute(scale, group)
        topk = self.config.moe_router_topk
        self.router.register_forward_hook(lambda _, args, out: decision.record(out[1], topk))

    return init


def wrap_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decide before a layer runs."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return original(self, hidden_states, *args, **kwargs)
        self.moe_layer_recompute = self.adaptive_recompute.is_uneven()
        with self.adaptive_recompute.recording():
            return original(self, hidden_states, *args, **kwargs)

    return forward
