"""One train step of a sharded model: gradients of a global batch, metrics, the update."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mindspeed import device
from mindspeed.config import ConfigError
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed.fsdp.param_group import units_of
from mindspeed.training.metrics import (
    PendingStep,
    StepResult,
    StepTotals,
    StopCheck,
    TotalsRead,
)
from mindspeed_mm.training.callbacks import Callbacks, MicroLoss, on_device
from mindspeed_mm.training.optimizer import local_shards


class Reports:
    """Collects the micro-batches of one rank; nothing here waits for the device."""

    def __init__(self, per_token: bool, context_group: dist.ProcessGroup | None = None) -> None:
        self._per_token, self._context_group = per_token, context_group
        self._names: list[str] | None = None
        self._reset()

    def add(self, loss: MicroLoss) -> MicroLoss:
        """Add a micro-batch; return it with the tokens of all ranks that share its sequences."""
        self._tokens.append(loss.tokens)
        if loss.tokens is not None and not self._per_token:
            loss = replace(loss, tokens=self._over_sequence(loss.tokens.float()))
        for name, value in loss.logs.items():
            self._pairs.setdefault(name, []).append(self._pair(value))
        return loss

    def reduce(self, *extras: torch.Tensor | float) -> StepTotals:
        """Add up over all ranks and reset; `extras` are added up with it."""
        if self._names is None:
            self._names = _union(self._pairs)
        if unknown := self._pairs.keys() - set(self._names):
            raise ConfigError(
                f"loss_func reports {sorted(unknown)[0]}, which it did not in the first step: "
                "report the same names in every step and on every rank"
            )
        where = device.current().torch_device
        row = [_sum(self._pairs.get(name, [])).to(where) for name in self._names]
        tokens = [t.to(where, torch.float32) for t in self._tokens if t is not None]
        last = [on_device(value, where).float() for value in extras]
        counted = torch.stack([sum(tokens, torch.zeros((), dtype=torch.float32, device=where))])
        total = torch.cat([*row, counted, *(value.reshape(1) for value in last)])
        dist.all_reduce(total)
        self._reset()
        return StepTotals(self._names, total)

    def _reset(self) -> None:
        self._pairs: dict[str, list[torch.Tensor]] = {}
        self._tokens: list[torch.Tensor | None] = []

    def _pair(self, value: Any) -> torch.Tensor:
        """Return a sum and its count: of tokens, or of micro-batches that have some."""
        pair = _as_tensor(value).float()
        if pair.numel() == 1:
            return torch.stack([pair.reshape(()), torch.ones_like(pair).reshape(())])
        if self._per_token:
            return pair
        pair = self._over_sequence(pair)
        mean, has_any = pair[0] / pair[1].clamp(min=1), pair[1].clamp(max=1)
        return torch.stack([mean, has_any])

    def _over_sequence(self, value: torch.Tensor) -> torch.Tensor:
        if self._context_group is not None:
            value = value.clone()
            dist.all_reduce(value, group=self._context_group)
        return value


def _as_tensor(value: Any) -> torch.Tensor:
    """Return what is reported as a tensor on the device."""
    where = device.current().torch_device
    if isinstance(value, (tuple, list)):
        value = torch.stack([on_device(part, where).reshape(()) for part in value])
    found = on_device(value, where)
    if found.numel() not in (1, 2):
        raise ConfigError(
            f"loss_func reports a tensor of shape {tuple(found.shape)}: report a number, or a sum "
            "and its count"
        )
    return found


def _sum(pairs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(pairs).sum(0) if pairs else torch.zeros(2, dtype=torch.float32)


def _union(mine: Iterable[str]) -> list[str]:
    """Return the names that any rank reports, in an order that all ranks share."""
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, list(mine))
    return list(dict.fromkeys(name for names in found for name in names))


class FsdpStep:
    """Trains one model step by step; FSDP2 takes the mean of gradients over all ranks."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        callbacks: Callbacks,
        dims: ParallelDims,
        *,
        clip: float,
        per_token: bool,
    ) -> None:
        self._model, self._optimizer, self._callbacks = model, optimizer, callbacks
        self._dims, self._clip, self._per_token = dims, clip, per_token
        self._roots = list(_outermost(model))
        self._units = units_of(model)
        self._is_reducing: bool | None = None
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._shares = torch.tensor([1 / _copies(p) for p in self._trained])
        self._is_fused = any(group.get("fused") for group in optimizer.param_groups)
        self._context_group = _context_group() if dims.cp > 1 else None
        self._reports = self._new_reports()
        self._last: PendingStep | None = None

    def train(self, batches: Iterator[Any], stop: StopCheck) -> PendingStep:
        """Train on one global batch."""
        count = self._dims.num_micro_batches
        for number in range(count):
            self._reduce_now(number == count - 1)
            loss = self._callbacks.loss(batches, self._model)
            if self._last is not None:
                self._last.wait()  # the device is busy with this step
            loss = self._reports.add(loss)
            self._backward(self._scaled(loss))
        gradients = local_shards(p.grad for p in self._trained if p.grad is not None)
        self._check_ended(is_complete=len(gradients) == len(self._trained))
        totals = self._reports.reduce(self._squares(gradients), float(stop()))
        read = self._update(gradients, totals)
        self._optimizer.zero_grad()
        self._last = PendingStep(partial(_result, read, self._per_token))
        return self._last

    def _backward(self, loss: torch.Tensor) -> None:
        """Run backward; add to torch's error about freed weights what may be the cause."""
        try:
            loss.backward()
        except RuntimeError as error:
            if found := [kind for kind, unit in self._units if not unit.has_visible_output]:
                raise RuntimeError(
                    f"{error}\n{found[0]} returned no tensor with a gradient, so its weights were "
                    "not gathered for the backward pass: if its result left it another way (a list "
                    "that it fills, an attribute), let forward return it, or do not name it in "
                    "sub_modules_to_wrap"
                ) from error
            raise

    def _check_ended(self, *, is_complete: bool) -> None:
        """Raise for units whose gradients a backward pass left behind.

        torch begins and ends the backward pass of a model at the tensors that it returned: it does
        not see those in other objects.
        """
        for kind, unit in self._units:
            if unit.is_in_backward or (not is_complete and any(unit.has_grads())):
                raise ConfigError(
                    f"the gradients of {kind} were not reduced over ranks, as torch saw no tensor "
                    "in what its forward returned, or the last loss of the step does not depend on "
                    "it: return tensors, containers or dataclasses, and call the model for every "
                    "loss (0 * its output for an empty batch)"
                )

    def _update(self, gradients: list[torch.Tensor], totals: StepTotals) -> TotalsRead:
        """Clip and update, unless anything is not finite; return the copy of the totals."""
        scale, read = self._scale(totals), totals.start_read()
        if self._is_fused:
            # The kernel clips and checks itself: the device need not wait for the host to read.
            optimizer: Any = self._optimizer
            optimizer.grad_scale = scale.reciprocal()
            optimizer.found_inf = 1.0 - totals.is_finite().float()
            optimizer.step()
        elif read.wait()[0].is_finite:
            if (factor := scale.item()) != 1.0:
                torch._foreach_mul_(gradients, factor)
            self._optimizer.step()
        return read

    def _scale(self, totals: StepTotals) -> torch.Tensor:
        """Return what to multiply gradients with."""
        scale = torch.ones_like(totals.tokens)
        if self._per_token:
            scale = scale / totals.tokens.clamp(min=1)
        if self._clip > 0:
            norm = totals.extra(0).sqrt() * scale
            scale = scale * (self._clip / (norm + 1e-6)).clamp(max=1)
        return scale

    def _squares(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return this rank's share of the squared norm of all gradients."""
        where = device.current().torch_device
        if not gradients:
            return torch.zeros((), device=where)
        real = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in real) else torch.float32
        norms = torch.stack(torch._foreach_norm(real, 2, dtype))
        self._shares = shares = self._shares.to(norms.device)
        if len(gradients) < len(self._trained):
            shares = shares[[p.grad is not None for p in self._trained]]
        return (norms.square() * shares).sum().to(where)

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean metrics of micro-batches, of which every rank has as many."""
        reports = self._new_reports()
        with self._evaluating():
            for batch in batches:
                reports.add(self._callbacks.loss(iter([batch]), self._model))
        return reports.reduce().read()[0].metrics

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
        if is_last != self._is_reducing:  # which takes time for every module
            self._is_reducing = is_last
            for root in self._roots:
                root.set_requires_gradient_sync(is_last)
                root.set_is_last_backward(is_last)

    def _scaled(self, loss: MicroLoss) -> torch.Tensor:
        """Return what to differentiate, so that the mean over all ranks is the mean of the step."""
        dims = self._dims
        if loss.tokens is None:
            return loss.value * (dims.cp / dims.num_micro_batches)
        if self._per_token:  # divided by the tokens of the step once they are known
            return loss.value * dims.world
        return loss.value / loss.tokens.clamp(min=1) * (dims.cp / dims.num_micro_batches)


def _copies(parameter: torch.Tensor) -> int:
    """Return how many ranks hold the same shard."""
    if not isinstance(parameter, DTensor):
        return dist.get_world_size()
    mesh = parameter.device_mesh
    shards = [mesh.size(n) for n, p in enumerate(parameter.placements) if p.is_shard()]
    return int(mesh.size() // math.prod(shards))


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


def _result(read: TotalsRead, per_token: bool) -> StepResult:
    """Wait for the totals of a step; return its result."""
    reduced, _ = read.wait()
    scale = 1.0 / max(reduced.tokens, 1) if per_token else 1.0
    squares, stops = reduced.extras
    return StepResult(
        metrics=reduced.metrics,
        grad_norm=math.sqrt(squares) * scale if squares >= 0 else math.nan,
        tokens=reduced.tokens,
        loss_scale=1.0,
        is_updated=reduced.is_finite,
        is_finite=reduced.is_finite,
        should_stop=stops > 0,
        done=read.done,
    )
