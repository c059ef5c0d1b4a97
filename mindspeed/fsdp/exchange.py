"""The messages in which ranks tell each other what of a pass they need and what they used."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist

import mindspeed.device
from mindspeed.fsdp.schedule import Pass

PASSES = (
    *("a forward pass without gradients", "a forward pass"),
    *("a backward pass", "a backward pass that reduces gradients"),
)


@dataclass(frozen=True)
class Answer:
    """What all ranks said, taken together."""

    asked: list[int]
    """Slots that any rank needs now."""
    used: list[int]
    """Which places of the schedule any rank used."""
    touched: list[list[int]]
    """Which parameters any rank has gradients for, by unit."""

    @property
    def is_end(self) -> bool:
        """Whether no rank needs anything more in this pass."""
        return not self.asked


class Exchange:
    """One small reduction over all ranks, from host memory, apart from what the model sends."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._group = _host_group()

    def ask(self, now: Pass, slot: int | None, touched: list[list[int]]) -> Answer:
        """Tell all ranks what this one needs, and learn what they need."""
        kind = [int(number == now.kind) for number in range(len(PASSES))]
        wanted = [int(number == slot) for number in range(self._slots)]
        parts = [kind, wanted, *touched, now.used]
        flat = list(chain.from_iterable(parts))
        # Of one length in passes of all kinds, or a wrong one could not be recognized.
        length = max(len(flat), len(flat) - len(now.used) + 4 * self._slots)
        message = torch.tensor(flat + [0] * (length - len(flat)), dtype=torch.uint8)
        if self._group is not None:
            dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group)
        kind, wanted, *touched, used = _split(message.tolist(), [len(part) for part in parts])
        if sum(kind) > 1:
            found = " and another in ".join(n for n, mark in zip(PASSES, kind, strict=True) if mark)
            raise RuntimeError(
                f"a rank is in {found}: in every step all ranks have to call the model, and "
                "backward, equally often"
            )
        return Answer([number for number, mark in enumerate(wanted) if mark], used, touched)

    def sequences(self, taken: Sequence[int]) -> list[tuple[int, ...]]:
        """Return what each rank took in a pass, every sequence once."""
        if self._group is None:
            return [tuple(taken)]
        length = torch.tensor(len(taken))
        dist.all_reduce(length, dist.ReduceOp.MAX, group=self._group)
        mine = torch.full((int(length),), -1)
        mine[: len(taken)] = torch.tensor(taken)
        theirs = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(theirs, mine, group=self._group)
        return list(dict.fromkeys(tuple(s for s in t.tolist() if s >= 0) for t in theirs))


def _split(values: list[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    start = 0
    for size in sizes:
        yield values[start : start + size]
        start += size


def _host_group() -> dist.ProcessGroup | None:
    if dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    # New groups do not inherit how long the ranks of the run wait for each other.
    options = getattr(world._get_backend(mindspeed.device.current().torch_device), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return dist.new_group(backend=mindspeed.device.known()["cpu"].backend, timeout=timeout)
