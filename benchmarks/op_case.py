"""The cases of benchmarks/ops: inputs, peers and minimum work, and the check of their results.

Outputs and gradients of a peer are compared with a wider reference, and two runs bit by bit.
"""

import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mindspeed import device

Outputs = torch.Tensor | tuple[torch.Tensor, ...]
OURS = "ours"
GEMMS = "GEMMs alone"  # the name of the row in results/ops.csv
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Work:
    """The minimum work of a pass: bytes of memory traffic and FLOPs of GEMMs."""

    bytes: int = 0
    flops: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def roofline(self, bytes_a_second: float, flops_a_second: float) -> float:
        """Return the lower bound of the time in seconds."""
        return max(self.bytes / bytes_a_second, self.flops / flops_a_second)


@dataclass(frozen=True)
class Case:
    """One benchmark: the same inputs for every peer, one row of results per peer and pass."""

    op: str
    shape: str
    """The sizes as shown in the table, e.g. 8192x4096."""
    make_inputs: Callable[[torch.device], tuple[Any, ...]]
    """Return new random inputs; those that require a gradient are the leaves of the backward."""
    peers: Mapping[str, Callable[..., Outputs] | None]
    """Called with the inputs; "ours" is ours; None for a peer that is not installed."""
    reference: Callable[..., Outputs]
    """Called with the inputs in float64 (or `reference_dtype`); what every peer has to return."""
    work: Mapping[str, Work]
    """The passes and the minimum work of each: "fwd", "bwd" (of a retained graph), "full"."""
    dtype: torch.dtype = torch.bfloat16
    tolerance: float | None = None
    """Largest ||out - reference|| / ||reference|| of any result; by default that of the dtype."""
    reference_dtype: torch.dtype = torch.float64
    gate_inputs: Callable[[torch.device], tuple[Any, ...]] | None = None
    """Smaller inputs for the check of correctness, where a float64 reference would not fit."""
    lower_bounds: Mapping[str, Callable[..., Mapping[str, Callable[[], Any]]]] = field(
        default_factory=dict
    )
    """Called with the inputs; returns by pass the part that no peer can avoid, e.g. its GEMMs:
    timed interleaved with the peers, but neither checked nor counted as one."""
    must_repeat: bool = True
    """Whether two runs of ours must be bitwise equal; a library's kernel may not guarantee that."""

    @property
    def allowed_error(self) -> float:
        """The tolerance of this case."""
        return TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance


def compiled(function: Callable[..., Outputs]) -> Callable[..., Outputs] | None:
    """Return the torch.compile version of an eager peer; only on an accelerator."""
    if device.current().name == "cpu":
        return None
    return torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)


def optional(target: str) -> Callable[..., Any] | None:
    """Return "package.module:name" where it can be imported and there is an accelerator."""
    if device.current().name == "cpu":
        return None
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None


@dataclass(frozen=True)
class Check:
    """The error of a peer against the reference, and whether two runs are bitwise equal."""

    error: float
    is_reproducible: bool


def run_pass(function, inputs, which):
    """Return a function that runs one pass: "fwd", "bwd" of a retained graph, or "full"."""
    if which == "fwd":
        return lambda: as_tuple(function(*inputs))
    leaves = [x for x in _flat(inputs) if x.requires_grad]
    outputs = _differentiable(function(*inputs))
    gradients = [_gradient(x) for x in outputs]
    if which == "bwd":
        return lambda: _backward(outputs, leaves, gradients, retain_graph=True)
    outputs = None  # frees the graph

    def full():
        return _backward(_differentiable(function(*inputs)), leaves, gradients)

    return full


def expected_results(case, inputs):
    """Return the outputs and gradients of the reference."""
    wide = tree_map_only(torch.Tensor, lambda x: _copy(x, case.reference_dtype), inputs)
    return _results(case, case.reference, wide)


def check(case, function, inputs, expected):
    """Run a peer twice on copies of the inputs, in memory that was filled with NaN."""
    runs = []
    for _ in range(2):
        copies = tree_map_only(torch.Tensor, _copy, inputs)
        _poison(copies)
        runs.append(_results(case, function, copies))
    error = max(_error(got, want) for got, want in zip(runs[0], expected, strict=True))
    return Check(error, all(_same_bits(a, b) for a, b in zip(*runs, strict=True)))


def as_tuple(outputs):
    """Return one output as a tuple of one."""
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def _results(case, function, inputs):
    outputs = as_tuple(function(*inputs))
    if case.work.keys() == {"fwd"}:
        return [x.detach() for x in outputs]
    leaves = [x for x in _flat(inputs) if x.requires_grad]
    differentiable = [x for x in outputs if x.requires_grad]
    saved = [x.detach().clone() for x in outputs]  # a gradient may be written over its output
    gradients = _backward(differentiable, leaves, [_gradient(x) for x in differentiable])
    return saved + [x for x in gradients if x is not None]


def _backward(outputs, leaves, gradients, retain_graph=False):
    return torch.autograd.grad(
        outputs, leaves, gradients, retain_graph=retain_graph, allow_unused=True
    )


def _differentiable(outputs):
    return [x for x in as_tuple(outputs) if x.requires_grad]


def _gradient(output):
    """Return the same gradient for every peer: exact in bf16, and one for a scalar loss."""
    if output.dim() == 0:
        return torch.ones_like(output)
    generator = torch.Generator(output.device).manual_seed(1)
    shape = {"size": output.shape, "device": output.device}
    return torch.randn(**shape, generator=generator, dtype=torch.bfloat16).to(output.dtype)


def _flat(inputs):
    found = []
    tree_map_only(torch.Tensor, found.append, inputs)
    return found


def _copy(x, dtype=None):
    wanted = dtype if dtype is not None and x.is_floating_point() else x.dtype
    copy = torch.empty_like(x, dtype=wanted).copy_(x.detach())  # the strides stay
    return copy.requires_grad_(x.requires_grad)


def _poison(inputs):
    """Fill the memory that the peer will get for its outputs with NaN."""
    count = 2 * sum(x.numel() for x in _flat(inputs))
    torch.full((count,), math.nan, device=_flat(inputs)[0].device)


def _error(got, want):
    got, want = got.to(want.dtype), want.detach()
    if got.shape != want.shape:
        raise ValueError(f"a result has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    difference = torch.linalg.vector_norm((got - want).double().flatten())
    scale = torch.linalg.vector_norm(want.double().flatten()).clamp_min(1e-30)
    return (difference / scale).item()


def _same_bits(a, b):
    a, b = (x.contiguous().flatten().view(torch.uint8) for x in (a, b))  # a scalar has no view
    return torch.equal(a, b)
