"""Tensors that autograd gets back by running a cheap function again.

    recompute = Recompute(norm, x)
    with recompute.of_output(y):        # y = norm(x)
        out = linear(y)                 # keeps a placeholder for y

Around the consumers of a function's output, saved-tensor hooks put a placeholder in the place of
the output; around the function itself (`of_function`), in the place of everything it keeps that is
not one of its inputs. The first placeholder that backward opens runs the function again. The graph
is the one that the forward pass recorded, so gradients are those of the plain run in every bit.
Nothing is freed by force: a tensor that something else still holds stays valid.

Hooks that were active before (swap, torch's checkpoint) get the inputs and every tensor that is no
placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

# How torch shows the hooks that are active; 2.7 does not. Unseen, they are left out, not broken.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Kept:
    """A tensor as the hooks around a recompute keep it."""

    value: Any
    unpack: Unpack | None

    @staticmethod
    def by_active_hooks(tensor: Tensor) -> Kept:
        """Keep a tensor, outside of any graph, as the active hooks want it."""
        hooks = None if _top_hooks is None else _top_hooks(True)
        if hooks is None:
            return Kept(tensor.detach(), None)
        pack, unpack = hooks
        return Kept(pack(tensor.detach()), unpack)

    def tensor(self) -> Tensor:
        """Return the tensor."""
        return self.value if self.unpack is None else self.unpack(self.value)


@dataclass(frozen=True, eq=False)
class _Part:
    """A view of a tensor that the function computes."""

    index: int | None
    """Which of the tensors that the function saves; None for its output."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Placeholder:
    """A saved tensor that is not there."""

    recompute: Recompute
    part: _Part


class Recompute:
    """A function of tensors that is cheap enough to run twice.

    Args:
        function: returns one tensor; draws no random numbers.
        inputs: its arguments; tensors are kept as the active saved-tensor hooks want it.
    """

    def __init__(self, function: Callable[..., Tensor], *inputs: Any) -> None:
        self._function = function
        self._inputs = [Kept.by_active_hooks(x) if isinstance(x, Tensor) else x for x in inputs]
        self._wants_grad = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
        self._input_storages = {_storage(x) for x in inputs if isinstance(x, Tensor)}
        # Parts know nothing of placeholders: a cycle would keep the inputs until it is collected.
        self._parts: list[_Part] = []
        self._ready: dict[_Part, Tensor] = {}

    @contextmanager
    def of_output(self, output: Tensor) -> Iterator[None]:
        """Keep placeholders for the output inside the block, where consumers save it."""
        same = (_storage(output), output.dtype)

        def pack(tensor: Tensor, outer: Pack) -> Any:
            is_output = (_storage(tensor), tensor.dtype) == same
            return self._placeholder(tensor) if is_output else outer(tensor)

        with _hooks(pack):
            yield

    @contextmanager
    def of_function(self) -> Iterator[None]:
        """Keep placeholders for what the function, called in the block, saves; not its inputs."""
        count = 0

        def pack(tensor: Tensor, outer: Pack) -> Any:
            nonlocal count
            count += 1
            if _storage(tensor) in self._input_storages or is_weight(tensor):
                return outer(tensor)
            return self._placeholder(tensor, count - 1)

        with _hooks(pack):
            yield

    def _placeholder(self, tensor: Tensor, index: int | None = None) -> _Placeholder:
        part = _Part(index, tensor.size(), tensor.stride(), tensor.storage_offset())
        self._parts.append(part)
        return _Placeholder(self, part)

    def restore(self, part: _Part) -> Tensor:
        """Return what a placeholder stands for; the first one runs the function for all."""
        if part not in self._ready:
            output, saved = self._run()
            for each in self._parts:
                self._ready[each] = each.of(output if each.index is None else saved[each.index])
        return self._ready.pop(part)

    def _run(self) -> tuple[Tensor, list[Tensor]]:
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> None:
            saved.append(tensor.detach())

        records = any(part.index is not None for part in self._parts)
        inputs = [x.tensor().detach() if isinstance(x, Kept) else x for x in self._inputs]
        with torch.set_grad_enabled(records), saved_tensors_hooks(pack, _never):
            if records:
                for x, wants_grad in zip(inputs, self._wants_grad):
                    if wants_grad:
                        x.requires_grad_()
            return self._function(*inputs).detach(), saved


def is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is there without being kept: a parameter or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def is_kept(tensor: Tensor) -> bool:
    """Return whether consumers of a tensor keep it for backward; a compiler decides by itself."""
    recorded = torch.is_grad_enabled() and tensor.requires_grad
    return recorded and not torch.compiler.is_compiling()


@contextmanager
def _hooks(pack: Callable[[Tensor, Pack], Any]) -> Iterator[None]:
    """Activate hooks whose `pack` may leave a tensor to those that were active before."""

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, _Placeholder):
            return kept.recompute.restore(kept.part)
        tensor: Tensor = kept.tensor()
        return tensor

    outer = None if _top_hooks is None else _top_hooks(True)

    def by_outer(tensor: Tensor) -> Kept:
        return Kept(tensor, None) if outer is None else Kept(outer[0](tensor), outer[1])

    with saved_tensors_hooks(lambda tensor: pack(tensor, by_outer), unpack):
        yield


def _never(_: None) -> Tensor:
    raise RuntimeError("a recomputed graph is not meant for backward")


def _storage(tensor: Tensor) -> int:
    # Not its address, which all empty ones share.
    return tensor.untyped_storage()._cdata
