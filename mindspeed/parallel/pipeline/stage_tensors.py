"""Several tensors between pipeline stages, each with its own shape and dtype.

A stage's module declares what it hands to the next stage:

    def output_specs(self):
        return [TensorSpec((S, B, H), torch.bfloat16), TensorSpec((P, B, H), torch.float32)]

and returns that many tensors, as a tuple, from `forward`; the next stage's `set_input_tensor` gets
them as a list with one item, the tuple. Megatron's schedules pass the tuple on like a tensor; here
are the functions that have to look into it: messages, backward, and freeing what was sent.

Where all stages declare the same shapes, a message is the tensors alone. Where they differ, or with
`variable_seq_lengths`, a header of numbers with shapes and dtypes goes first. A tensor that is not
of floating point has no gradient; one that nothing has used has zeros.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, Variable

from mindspeed.config import ConfigError, RankConfigError
from mindspeed.parallel.pipeline.zero_bubble import posting

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_MOST_TENSORS, _MOST_DIMS = 8, 6
_WIDTH = 2 + _MOST_DIMS  # of a header's row: dtype, number of dimensions, sizes
_UNDECLARED = "has_no_stage_tensors"
"""The attribute of a model's first chunk where no stage declares anything."""


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor between two stages looks like; None is a size that varies."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype

    @property
    def has_gradient(self) -> bool:
        """Whether the next stage sends a gradient of it back."""
        return self.dtype.is_floating_point

    def matches(self, tensor: Tensor) -> bool:
        """Whether a tensor has the declared shape and dtype."""
        sizes = zip(self.shape, tensor.shape, strict=False)
        is_same = all(size in (None, actual) for size, actual in sizes)
        return is_same and len(self.shape) == tensor.dim() and self.dtype == tensor.dtype


Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Hops:
    """What the stages of one model exchange."""

    mine: tuple[Specs, ...]
    """What each chunk on this rank sends on."""
    fixed: Specs | None
    """What every stage sends on; None where headers say it."""

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise RankConfigError unless a chunk on this rank has declared these tensors."""
        for specs in self.mine:
            pairs = zip(specs, tensors, strict=False)
            if len(specs) == len(tensors) and all(s.matches(t) for s, t in pairs):
                return
        given = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors)
        declared = " or ".join(
            ", ".join(f"{s.shape} {s.dtype}" for s in specs) or "nothing" for specs in self.mine
        )
        raise RankConfigError(
            f"a pipeline stage returned {given} but its output_specs() declares {declared}: make "
            "them agree"
        )


# What the stages of the model that trains exchange; None for models that declare nothing.
_hops: ContextVar[Hops | None] = ContextVar("stage_tensors", default=None)


def wrap_get_forward_backward_func(original: Callable[..., Any]) -> Callable[..., Any]:
    """Exchange the declarations of a model's stages before its schedule runs."""

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = original(*args, **kwargs)

        @functools.wraps(schedule)
        def forward_backward(*, model: Any, **options: Any) -> Any:
            communicator = options.get("p2p_communicator")
            token = _hops.set(_hops_of(model if isinstance(model, list) else [model], communicator))
            try:
                return schedule(model=model, **options)
            finally:
                _hops.reset(token)

        return forward_backward

    return get_forward_backward_func


def _hops_of(chunks: Sequence[Any], communicator: Any) -> Hops | None:
    """Exchange declarations; the last stage of all may have none.

    Whether a model has any is exchanged once; the sizes that it declares may change between steps.
    """
    if getattr(chunks[0], _UNDECLARED, False):
        return None
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    group = (
        parallel_state.get_pipeline_model_parallel_group()
        if communicator is None
        else communicator.pp_group
    )
    mine = tuple(_declared(chunk) for chunk in chunks)
    everywhere: list[tuple[Specs | None, ...]] = [()] * group.size()
    torch.distributed.all_gather_object(everywhere, mine, group=group)
    sent = [specs for rank in everywhere for specs in rank]
    del sent[-1]  # the last chunk of the last rank sends nothing
    declared = [specs for specs in sent if specs is not None]
    if not declared:
        setattr(chunks[0], _UNDECLARED, True)
        return None
    # What all ranks know is checked here, so that all stop with one line.
    for specs in declared:
        _check(specs)
    if len(declared) < len(sent):
        raise ConfigError(
            f"{len(sent) - len(declared)} of {len(sent)} pipeline stages have no output_specs(): "
            "declare it in the module of every stage but the last, or of none"
        )
    varies = get_model_config(chunks[0]).variable_seq_lengths
    if not varies and any(None in spec.shape for specs in declared for spec in specs):
        raise ConfigError(
            "output_specs() has a size of None, which needs --variable-seq-lengths: add it or "
            "declare the size"
        )
    is_fixed = not varies and len(set(declared)) == 1
    return Hops(tuple(specs or () for specs in mine), declared[0] if is_fixed else None)


def _declared(chunk: Any) -> Specs | None:
    """Return what the innermost module of a chunk declares."""
    while True:
        declare = getattr(chunk, "output_specs", None)
        if declare is not None:
            return tuple(declare())
        if not hasattr(chunk, "module"):
            return None
        chunk = chunk.module


def _check(specs: Specs) -> None:
    """Raise ConfigError for what a header cannot describe."""
    if not 0 < len(specs) <= _MOST_TENSORS:
        raise ConfigError(f"output_specs() declares {len(specs)} tensors: use 1 to {_MOST_TENSORS}")
    for spec in specs:
        if len(spec.shape) > _MOST_DIMS or spec.dtype not in _DTYPES:
            raise ConfigError(
                f"output_specs() declares {spec}: use at most {_MOST_DIMS} dimensions and one of "
                + ", ".join(map(str, _DTYPES))
            )


def wrap_communicate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Exchange tuples where stages declare them; of Megatron 0.12, which has functions."""

    @functools.wraps(original)
    def _communicate(*args: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state

        hops = _hops.get()
        if hops is None:
            return original(*args, **kwargs)
        neighbours = _Neighbours(
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_prev_rank(),
            parallel_state.get_pipeline_model_parallel_next_rank(),
        )
        config = kwargs.pop("config")
        return _exchange(hops, neighbours, config, **kwargs)

    return _communicate


def wrap_communicator_communicate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Exchange tuples where stages declare them; of newer Megatron, which has a communicator."""

    @functools.wraps(original)
    def _communicate(self: Any, *args: Any, **kwargs: Any) -> Any:
        hops = _hops.get()
        if hops is None:
            return original(self, *args, **kwargs)
        neighbours = _Neighbours(self.pp_group, self.prev_rank, self.next_rank)
        return _exchange(hops, neighbours, self.config, **kwargs)

    return _communicate


@dataclass(frozen=True)
class _Neighbours:
    """The ranks of the stages before and behind this one."""

    group: Any
    previous: int
    next: int

    def start(self, config: Any, **tensors: Tensor | None) -> dict[str, Any]:
        """Start up to four messages as Megatron does; return what to wait for."""
        from megatron.core.pipeline_parallel import p2p_communication

        batched = config.batch_p2p_comm
        ops = p2p_communication._batched_p2p_ops if batched else p2p_communication._p2p_ops
        tensors = {name: tensors.get(name) for name in _DIRECTIONS}
        handles = ops(
            **{f"tensor_{name}": tensor for name, tensor in tensors.items()},
            group=self.group,
            prev_pipeline_rank=self.previous,
            next_pipeline_rank=self.next,
        )
        return {"all": _All(handles)} if isinstance(handles, list) else handles


_DIRECTIONS = ("send_prev", "recv_prev", "send_next", "recv_next")


class _All:
    """Several messages to wait for."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = list(handles)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


def _exchange(
    hops: Hops,
    neighbours: _Neighbours,
    config: Any,
    *,
    tensor_send_next: Sequence[Tensor] | None,
    tensor_send_prev: Sequence[Tensor | None] | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Any = None,
    wait_on_reqs: bool = True,
) -> tuple[Any, Any, Any]:
    """Send and receive tuples of tensors; the signature is that of Megatron's `_communicate`."""
    if tensor_send_next is not None:
        hops.check(tensor_send_next)
    sent = {
        "send_next": _contiguous(tensor_send_next),
        "send_prev": _contiguous(tensor_send_prev),
    }
    with posting():
        buffers, handles = _start(hops, neighbours, config, sent, recv_prev, recv_next)
    waits = {name: _All(each) for name, each in handles.items()}
    if wait_on_reqs:
        _All(list(waits.values())).wait()
    return buffers["recv_prev"], buffers["recv_next"], None if wait_on_reqs else waits


def _start(
    hops: Hops,
    neighbours: _Neighbours,
    config: Any,
    sent: dict[str, tuple[Tensor, ...] | None],
    recv_prev: bool,
    recv_next: bool,
) -> tuple[dict[str, tuple[Tensor, ...] | None], dict[str, list[Any]]]:
    """Start all messages of an exchange; return what will be received, and what to wait for."""
    if hops.fixed is not None:
        gradients = tuple(spec for spec in hops.fixed if spec.has_gradient)
        received = {"recv_prev": hops.fixed, "recv_next": gradients}
    else:
        received = _exchange_headers(neighbours, config, sent, recv_prev, recv_next)
    wanted = {"recv_prev": recv_prev, "recv_next": recv_next}
    buffers = {
        name: tuple(map(_empty, received[name])) if is_wanted else None
        for name, is_wanted in wanted.items()
    }
    columns: dict[str, Sequence[Tensor]] = {k: v for k, v in (sent | buffers).items() if v}
    handles: dict[str, list[Any]] = {}
    for row in range(max(map(len, columns.values()), default=0)):
        tensors = {name: column[row] for name, column in columns.items() if row < len(column)}
        for name, handle in neighbours.start(config, **tensors).items():
            handles.setdefault(name, []).append(handle)
    return buffers, handles


def _contiguous(tensors: Sequence[Tensor | None] | None) -> tuple[Tensor, ...] | None:
    if tensors is None:
        return None
    return tuple(tensor.detach().contiguous() for tensor in tensors if tensor is not None)


def _empty(spec: TensorSpec) -> Tensor:
    shape = [size for size in spec.shape if size is not None]
    return torch.empty(shape, dtype=spec.dtype, device=_device(), requires_grad=spec.has_gradient)


def _device() -> torch.device:
    from mindspeed import device

    return torch.device(device.current().torch_device)


def _exchange_headers(
    neighbours: _Neighbours,
    config: Any,
    sent: dict[str, tuple[Tensor, ...] | None],
    recv_prev: bool,
    recv_next: bool,
) -> dict[str, Specs]:
    """Exchange headers with both neighbours; return the specs of what will be received."""
    messages = {name: _header(tensors) for name, tensors in sent.items() if tensors is not None}
    for name, is_wanted in (("recv_prev", recv_prev), ("recv_next", recv_next)):
        if is_wanted:
            messages[name] = _header(())
    _All(list(neighbours.start(config, **messages).values())).wait()
    return {
        name: _specs_in(messages[name]) if name in messages else ()
        for name in ("recv_prev", "recv_next")
    }


def _header(tensors: Sequence[Tensor]) -> Tensor:
    """Return a row for each tensor; -1 in the first column of a row that is not used."""
    rows = torch.full((_MOST_TENSORS, _WIDTH), -1, dtype=torch.int64)
    for row, tensor in zip(rows, tensors, strict=False):
        numbers = (_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape)
        row[: len(numbers)] = torch.tensor(numbers)
    return rows.to(_device())


def _specs_in(header: Tensor) -> Specs:
    rows = (row for row in header.tolist() if row[0] >= 0)
    return tuple(TensorSpec(tuple(sizes[:dims]), _DTYPES[code]) for code, dims, *sizes in rows)


class _Alias(Function):
    """The values of a tensor as one that is no view of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def wrap_forward_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return each tensor of a tuple as an alias, whose values may be freed.

    The graph of a stage may have saved an output itself: freeing that would change gradients.
    """

    @functools.wraps(original)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        outputs, num_tokens = original(*args, **kwargs)
        return outputs if _hops.get() is None else _aliased(outputs), num_tokens

    return forward_step


def _aliased(output: Any) -> Any:
    """Return a tensor, a tuple or a list of them as aliases."""
    if isinstance(output, (tuple, list)):
        aliases = map(_aliased, output)
        return list(aliases) if isinstance(output, list) else tuple(aliases)
    return _Alias.apply(output) if isinstance(output, Tensor) else output


def wrap_deallocate_output_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Free each tensor of a tuple that has a gradient: backward needs its graph alone."""

    @functools.wraps(original)
    def deallocate_output_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
        if not isinstance(out, (tuple, list)):
            original(out, deallocate_pipeline_outputs)
            return
        for tensor in out:
            if tensor.grad_fn is not None:
                original(tensor, deallocate_pipeline_outputs)

    return deallocate_output_tensor


def wrap_backward_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Go backward from every output that has a gradient, to every input."""
    signature = inspect.signature(original)  # 0.14 has one more parameter

    @functools.wraps(original)
    def backward_step(*args: Any, **kwargs: Any) -> Any:
        if _hops.get() is None:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        input_tensor, output_tensor_grad = given["input_tensor"], given["output_tensor_grad"]
        inputs, outputs = _flat(input_tensor), _flat(given["output_tensor"])
        config = given["config"]
        for x in inputs:
            if x.requires_grad:
                x.retain_grad()
        gradients = _flat(output_tensor_grad)
        if not gradients:  # the last stage: its output is the loss
            scale = config.grad_scale_func
            _backward([outputs[0] if scale is None else scale(outputs[0])], [None])
        else:
            roots = [out for out in outputs if out.dtype.is_floating_point]
            pairs = [pair for pair in zip(roots, gradients, strict=True) if pair[0].requires_grad]
            _backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        found = tuple(
            torch.zeros_like(x) if x.grad is None else x.grad
            for x in inputs
            if x.dtype.is_floating_point
        )
        result = found if inputs else None
        return [result] if isinstance(input_tensor, list) else result

    return backward_step


def _flat(tensors: Any) -> list[Tensor]:
    """Return the tensors of a tensor, a tuple, a list with a tuple, or None."""
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for each in tensors or () for tensor in _flat(each)]


def _backward(outputs: list[Tensor], gradients: list[Tensor | None]) -> None:
    """Run backward; freed outputs have lost the shape that torch would compare."""
    roots = [
        torch.ones_like(output) if gradient is None else gradient
        for output, gradient in zip(outputs, gradients, strict=True)
    ]
    if outputs:
        Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
            tensors=tuple(outputs),
            grad_tensors=tuple(roots),
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
