"""Tensors of any strides in the collectives of gloo, which takes memory for elements.

Gloo reads and writes numel elements from the first one on, whatever the strides: a slice gets the
sum of its neighbours. The methods of a process group, where all of torch.distributed ends, get
contiguous copies instead, and what gloo wrote into a copy goes to the caller's tensor when the
work is waited for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.device.facade.uneven import padded_arguments

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu

_IN_PLACE = ("allreduce", "allreduce_coalesced")
_ROOTED = ("broadcast", "reduce")
_OUT_OF_PLACE = (
    "allgather allgather_coalesced allgather_into_tensor_coalesced all_gather_single_coalesced "
    "gather scatter reduce_scatter reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced "
    "alltoall alltoall_base all_to_all_single recv recv_anysource"
).split()
# Elements are gathered and scattered here; gloo wants every piece in the shape of a slice.
_OF_ANY_SHAPE = (
    "_allgather_base all_gather_single _reduce_scatter_base reduce_scatter_single".split()
)
_PASSED_ON = (
    "is_success exception source_rank _source_rank block_current_stream get_future_result "
    "_get_op_type _get_duration"
).split()

_Pairs = list[tuple[Tensor, Tensor]]


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield the methods of process groups and of their backends."""
    if not dist.is_available():
        return
    kinds = {"send": _send, **dict.fromkeys(_ROOTED, _rooted)}
    kinds |= dict.fromkeys((*_IN_PLACE, *_OUT_OF_PLACE), _writing)
    kinds |= dict.fromkeys(_OF_ANY_SHAPE, _flat)
    for owner in (dist.ProcessGroup, torch._C._distributed_c10d.Backend):
        for name, kind in kinds.items():
            if name in vars(owner):
                yield owner, name, kind(getattr(owner, name))


def _writing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        pairs: _Pairs = []
        args = padded_arguments(original.__name__, args, pairs)
        args, kwargs = _contiguous_arguments(original.__name__, args, kwargs, pairs)
        return _landing(original(group, *args, **kwargs), pairs)

    return collective


def _flat(original: Callable[..., Any]) -> Callable[..., Any]:
    def collective(group: Any, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        pairs: _Pairs = []
        output = _contiguous(original.__name__, output, pairs)
        input = _contiguous(original.__name__, input, None)
        if output.shape[1:] != input.shape[1:]:
            output, input = output.view(-1), input.view(-1)
        return _landing(original(group, output, input, *args, **kwargs), pairs)

    @functools.wraps(original)
    def with_either_name(group: Any, *args: Any, **kwargs: Any) -> Any:
        # One of these methods names outputTensor what the others name output.
        kwargs = {key.removesuffix("Tensor"): value for key, value in kwargs.items()}
        return collective(group, *args, **kwargs)

    return with_either_name


def _rooted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Write on the ranks that get something: all but the root, or the root alone."""
    reduces = original.__name__ == "reduce"

    @functools.wraps(original)
    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        options = args[1] if len(args) > 1 else kwargs.get("opts", kwargs.get("root", 0))
        writes = (group.rank() == getattr(options, "rootRank", options)) == reduces
        pairs: _Pairs | None = [] if writes else None
        args, kwargs = _contiguous_arguments(original.__name__, args, kwargs, pairs)
        if reduces and not writes:
            # Gloo uses the tensor as scratch memory where NCCL leaves it alone.
            args, kwargs = _cloned(args), {key: _cloned(each) for key, each in kwargs.items()}
        return _landing(original(group, *args, **kwargs), pairs)

    return collective


def _send(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def send(group: Any, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        # A pipeline stage takes the memory out of a tensor as soon as it is on its way
        # (`tensor.data = ...`). The work then holds an empty tensor, and gloo would send what else
        # is put into that memory; a second tensor holds it until the work is done.
        held = [_contiguous("send", tensor, None).detach() for tensor in tensors]
        return original(group, held, *args, **kwargs)

    return send


def _contiguous_arguments(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], pairs: _Pairs | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace strided tensors by copies and record those of the outputs, the first argument."""
    args = tuple(
        _contiguous(name, each, pairs if number == 0 else None) for number, each in enumerate(args)
    )
    for key, each in kwargs.items():
        is_output = key.startswith(("output", "tensor"))
        kwargs[key] = _contiguous(name, each, pairs if is_output else None)
    return args, kwargs


def _contiguous(name: str, value: Any, pairs: _Pairs | None) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or (value.is_contiguous() and not value.is_neg()):
            return value
        copy = value.detach().resolve_neg().contiguous()
        if pairs is not None:
            _require_own_memory(name, value)
            pairs.append((value, copy))
        return copy
    if isinstance(value, (list, tuple)):
        return [_contiguous(name, each, pairs) for each in value]
    return value


def _require_own_memory(name: str, output: Tensor) -> None:
    reach = 0
    for step, size in sorted(zip(output.stride(), output.shape)):
        if size > 1 and step <= reach:
            raise ValueError(
                f"{name} was given an output of shape {tuple(output.shape)} and strides "
                f"{output.stride()}, whose elements share memory and cannot hold different "
                "results: pass a contiguous tensor"
            )
        reach += step * (size - 1)


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_cloned(each) for each in value] if isinstance(value, (list, tuple)) else value


def _landing(work: Any, pairs: _Pairs | None) -> Any:
    return _Landing(work, pairs) if pairs and work is not None else work


class _Landing(dist.Work):
    """The work of a collective on copies: complete when the results lie in the caller's tensors."""

    def __init__(self, work: Any, pairs: _Pairs) -> None:
        super().__init__()
        self._work = work
        self._pairs = pairs
        self._tensors = {copy.data_ptr(): tensor for tensor, copy in pairs}
        self._lock = threading.Lock()

    def _land(self) -> None:
        """Write the results once: afterwards the tensors are the caller's to change."""
        with self._lock, torch.inference_mode():
            while self._pairs:
                tensor, copy = self._pairs.pop(0)
                tensor.copy_(copy)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for gloo and write the results."""
        done: bool = self._work.wait(timeout)
        self._land()
        return done

    def is_completed(self) -> bool:
        """Return whether the results have arrived, and copy them to their outputs."""
        done: bool = self._work.is_completed()
        if done and self._work.is_success():
            self._land()
        return done

    def synchronize(self) -> None:
        """Wait as gloo does, which completes the work on a cpu only where it is complete."""
        self._work.synchronize()
        self.is_completed()

    def result(self) -> list[Tensor]:
        """Return the caller's tensors."""
        results: list[Tensor] = self._callers(self._work.result())
        self._land()
        return results

    def get_future(self) -> Any:
        """Return a future of the caller's tensors."""

        def land(future: Any) -> Any:
            value = future.value()
            self._land()
            return self._callers(value)

        return self._work.get_future().then(land)

    def _callers(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensors.get(value.data_ptr(), value)
        return [self._callers(each) for each in value] if isinstance(value, list) else value


def _passed_on(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(dist.Work, name))
    def call(landing: _Landing, *args: Any) -> Any:
        return getattr(landing._work, name)(*args)

    return call


for _name in _PASSED_ON:
    if hasattr(dist.Work, _name):
        setattr(_Landing, _name, _passed_on(_name))
