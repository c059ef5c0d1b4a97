"""One step of a sharded model: gradients of a global batch, their norm, the update."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mindspeed import device
from mindspeed_llm.training.step import StepResult
from mindspeed_mm.training.callbacks import Callbacks, MicroLoss
from mindspeed_mm.training.reports import Reports
from mindspeed_mm.training.world import Layout


class FsdpStepper:
    """Runs steps of one model; FSDP2 takes the mean of gradients over all ranks."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        callbacks: Callbacks,
        layout: Layout,
        *,
        clip: float,
        per_token: bool,
    ) -> None:
        self._model, self._optimizer, self._callbacks = model, optimizer, callbacks
        self._layout, self._clip, self._per_token = layout, clip, per_token
        self._roots = list(_outermost(model))
        self._context_group = _context_group() if layout.cp > 1 else None
        self._reports = self._new_reports()

    def train(self, batches: Iterator[Any], stop: bool = False) -> StepResult:
        """Learn from one global batch; `stop` is this rank's wish to end, which becomes all's."""
        count = self._layout.micro_batches
        for number in range(count):
            self._reduce_now(number == count - 1)
            loss = self._callbacks.loss(batches, self._model)
            loss = self._reports.add(loss)
            self._scaled(loss).backward()
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        shared = self._reports.share(_squares(gradients), float(stop))
        scale = 1.0 / max(shared.tokens, 1) if self._per_token else 1.0
        norm = math.sqrt(shared.sums[0]) * scale if shared.sums[0] >= 0 else math.nan
        is_finite = math.isfinite(norm) and all(map(math.isfinite, shared.losses.values()))
        if is_finite:
            if self._clip > 0:
                scale *= min(1.0, self._clip / (norm + 1e-6))
            if scale != 1.0:
                _multiply(gradients, scale)
            self._optimizer.step()
        self._optimizer.zero_grad()
        return StepResult(
            losses=shared.losses,
            grad_norm=norm,
            tokens=shared.tokens,
            loss_scale=1.0,
            is_updated=is_finite,
            is_finite=is_finite,
            is_asked_to_stop=shared.sums[1] > 0,
        )

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean losses of micro-batches, of which every rank has as many."""
        reports = self._new_reports()
        with self._evaluating():
            for batch in batches:
                reports.add(self._callbacks.loss(iter([batch]), self._model))
        return reports.share().losses

    def to_show(self, batches: Iterable[Any]) -> list[Any]:
        """Return what is to be shown of micro-batches, of which every rank has as many."""
        with self._evaluating():
            return [self._callbacks.to_show(iter([batch]), self._model) for batch in batches]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        with torch.no_grad():
            yield
        for module, mode in modes:  # a frozen part may have been in evaluation mode all along
            module.training = mode

    def _new_reports(self) -> Reports:
        return Reports(self._per_token, self._context_group)

    def _reduce_now(self, is_last: bool) -> None:
        """Until the last micro-batch of a step gradients only add up, on each rank for itself."""
        for root in self._roots:
            root.set_requires_gradient_sync(is_last)
            root.set_is_last_backward(is_last)

    def _scaled(self, loss: MicroLoss) -> torch.Tensor:
        """Return what to differentiate, so that the mean over all ranks is the mean of the step."""
        layout = self._layout
        if loss.tokens is None:
            return loss.value * (layout.cp / layout.micro_batches)
        if self._per_token:  # divided by the tokens of the step once they are known
            return loss.value * layout.world
        return loss.value / loss.tokens.clamp(min=1) * (layout.cp / layout.micro_batches)


def _squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return this rank's share of the squared norm of all gradients."""
    where = device.current().torch_device
    if not gradients:
        return torch.zeros((), device=where)
    norms = torch._foreach_norm(_local(gradients), 2, torch.float32)
    copies = torch.tensor([_copies(gradient) for gradient in gradients])
    return (torch.stack(norms).square() / copies.to(norms[0].device)).sum().to(where)


def _copies(gradient: torch.Tensor) -> int:
    """Return how many ranks hold the same shard."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size()
    mesh = gradient.device_mesh
    shards = [mesh.size(n) for n, place in enumerate(gradient.placements) if place.is_shard()]
    return int(mesh.size() // math.prod(shards))


def _multiply(gradients: list[torch.Tensor], factor: float) -> None:
    torch._foreach_mul_(_local(gradients), factor)


@torch.no_grad()
def _local(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's shards themselves, not copies."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def _outermost(model: nn.Module) -> Iterator[FSDPModule]:
    if isinstance(model, FSDPModule):
        yield model
    else:
        for child in model.children():
            yield from _outermost(child)


def _context_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
    return group
