"""Copies that happen as late as they may: what reads one without waiting for it reads rubbish."""

import weakref
from dataclasses import dataclass, field

import torch

RUBBISH = 0xAB  # in every byte: a number in float32, far from any result


@dataclass(eq=False)
class Copy:
    """A queued copy, which is its own event."""

    stream: "DelayedCopies"
    target: torch.Tensor
    source: object
    after: tuple["Copy", ...]
    is_done: bool = False


@dataclass
class DelayedCopies:
    """Stands for a stream of copies; nothing is copied before the computation waits for it.

    The source of a copy to the host is not kept alive here: given up too early, it is gone.
    """

    keeps_source: bool
    queue: list[Copy] = field(default_factory=list)
    count: int = 0

    def start(self, target, source, *after):
        if all(copy.is_done for copy in after):
            _spoil(target)
        self.count += 1
        reference = (lambda: source) if self.keeps_source else weakref.ref(source)
        self.queue.append(Copy(self, target, reference, after))
        return self.queue[-1]

    def wait(self, event):
        if event.is_done:
            return
        for copy in self.queue[: self.queue.index(event) + 1]:
            for other in copy.after:
                other.stream.wait(other)
            source = copy.source()
            _spoil(copy.target) if source is None else copy.target.copy_(source)
            copy.is_done = True
        self.queue = [copy for copy in self.queue if not copy.is_done]

    finish = wait


def _spoil(target):
    rubbish = torch.full((target.element_size(),), RUBBISH, dtype=torch.uint8)
    target.copy_(rubbish.view(target.dtype).expand_as(target))


def delayed_swapper(min_bytes=0):
    """Return a swapper that works on a cpu, with copies that are late."""
    from mindspeed.memory.swap import Swapper

    return Swapper(min_bytes, DelayedCopies(False), DelayedCopies(True))
