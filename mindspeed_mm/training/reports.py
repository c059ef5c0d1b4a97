"""What the loss function of a script reports, added up over a step and over all ranks."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.config import ConfigError
from mindspeed.training.metrics import StepTotals
from mindspeed_mm.training.callbacks import MicroLoss, on_device


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
