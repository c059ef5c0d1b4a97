"""Moves between the device and the host, which are both the cpu here.

Megatron takes a copy to the host and goes on to change the tensor; it updates on the host what it
finds there and nothing else. So a move to the host is a copy, and the copy is known as one, as is
what is made in its likeness.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed.device.facade.caller import is_other_library
from mindspeed.device.facade.tensors import on_cpu

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu


_LIKENESSES = "empty_like full_like ones_like rand_like randint_like randn_like zeros_like".split()


class _Moves:
    """The methods of a tensor that move it, and the memory of what was moved to the host."""

    def __init__(self) -> None:
        self._on_host = WeakTensorKeyDictionary()

    def cuda(self, tensor: Tensor) -> Tensor:
        """Return the tensor, which is there already, unless it is known to be somewhere else."""
        # After a real move the rows of an expanded tensor are apart, and Megatron writes to them.
        rows = zip(tensor.stride(), tensor.shape, strict=True)
        if any(step == 0 and size > 1 for step, size in rows):
            return tensor.contiguous()
        return tensor.clone() if self.is_on_host(tensor) else tensor

    def host(self, tensor: Tensor) -> Tensor:
        """Remember that the tensor is on the host."""
        if not torch.compiler.is_dynamo_compiling():
            self._on_host[tensor] = True
        return tensor

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether the tensor is known to be on the host; in a graph none is."""
        return not torch.compiler.is_dynamo_compiling() and tensor in self._on_host

    def is_cuda(self, tensor: Tensor) -> bool:
        """Answer Megatron, which prepares tensors for collectives only where this is true."""
        if is_other_library(depth=3):
            return tensor.device.type == "cuda"
        return tensor.device.type in ("cpu", "cuda") and not self.is_on_host(tensor)


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield (owner, attribute, stand-in) for everything that moves a tensor."""
    moves = _Moves()
    yield Tensor, "to", _to(Tensor.to, moves)
    yield Tensor, "cuda", _always(moves.cuda, Tensor.cuda)
    yield Tensor, "cpu", _cpu(Tensor.cpu, moves)
    yield Tensor, "pin_memory", _always(moves.host, Tensor.pin_memory)
    yield Tensor, "is_cuda", property(lambda tensor: moves.is_cuda(tensor))
    for name in _LIKENESSES:
        yield torch, name, _like(getattr(torch, name), moves)


def _always(move: Callable[[Tensor], Tensor], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def always(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function_unary(tensor):
            return handle_torch_function(always, (tensor,), tensor, *args, **kwargs)
        return move(tensor)

    return always


def _cpu(original: Callable[..., Any], moves: _Moves) -> Callable[..., Any]:
    @functools.wraps(original)
    def cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function_unary(tensor):
            return handle_torch_function(cpu, (tensor,), tensor, *args, **kwargs)
        if is_other_library():
            return original(tensor, *args, **kwargs)
        return moves.host(tensor.clone())

    return cpu


def _to(original: Callable[..., Any], moves: _Moves) -> Callable[..., Any]:
    on_device = on_cpu(original, position=1)

    @functools.wraps(original)
    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function_unary(tensor):
            return handle_torch_function(to, (tensor,), tensor, *args, **kwargs)
        moved = on_device(tensor, *args, **kwargs)
        # The string "cpu" means the host; a device object may be that of another tensor.
        device = kwargs.get("device", args[0] if args else None)
        if not isinstance(device, str) or is_other_library():
            return moved
        if device == "cpu":
            return moves.host(moved.clone() if moved is tensor else moved)
        return moves.cuda(moved)

    return to


def _like(original: Callable[..., Any], moves: _Moves) -> Callable[..., Any]:
    on_device = on_cpu(original)

    @functools.wraps(original)
    def like(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function_unary(input):
            return handle_torch_function(like, (input,), input, *args, **kwargs)
        made = on_device(input, *args, **kwargs)
        elsewhere = kwargs.get("device") is not None
        return made if elsewhere or not moves.is_on_host(input) else moves.host(made)

    return like
