"""Is a peer right? Outputs and gradients against a wider reference, and two runs for equal bits."""

import math
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class Verdict:
    """How far a peer is from the reference, and whether it repeats itself."""

    error: float
    repeats: bool


def run_pass(function, inputs, which):
    """Return what runs one pass of `function`: "fwd", "bwd" of a kept graph, or "full"."""
    if which == "fwd":
        return lambda: as_tuple(function(*inputs))
    leaves = [x for x in _flat(inputs) if x.requires_grad]
    outputs = _differentiable(function(*inputs))
    gradients = [_gradient(x) for x in outputs]
    if which == "bwd":
        return lambda: _backward(outputs, leaves, gradients, retain_graph=True)
    outputs = None  # its graph would stay in memory

    def full():
        return _backward(_differentiable(function(*inputs)), leaves, gradients)

    return full


def expected_results(case, inputs):
    """Return the outputs and gradients of the reference."""
    wide = tree_map_only(torch.Tensor, lambda x: _copy(x, case.reference_dtype), inputs)
    return _results(case, case.reference, wide)


def judge(case, function, inputs, expected):
    """Run a peer twice on copies of the inputs, in memory that held NaN before."""
    runs = []
    for _ in range(2):
        copies = tree_map_only(torch.Tensor, _copy, inputs)
        _poison(copies)
        runs.append(_results(case, function, copies))
    error = max(_error(got, want) for got, want in zip(runs[0], expected, strict=True))
    return Verdict(error, all(_same_bits(a, b) for a, b in zip(*runs, strict=True)))


def as_tuple(outputs):
    """Return one output as a tuple of one."""
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def _results(case, function, inputs):
    outputs = as_tuple(function(*inputs))
    if case.work.keys() == {"fwd"}:
        return [x.detach() for x in outputs]
    leaves = [x for x in _flat(inputs) if x.requires_grad]
    differentiable = [x for x in outputs if x.requires_grad]
    kept = [x.detach().clone() for x in outputs]  # a gradient may be written over its output
    gradients = _backward(differentiable, leaves, [_gradient(x) for x in differentiable])
    return kept + [x for x in gradients if x is not None]


def _backward(outputs, leaves, gradients, retain_graph=False):
    return torch.autograd.grad(
        outputs, leaves, gradients, retain_graph=retain_graph, allow_unused=True
    )


def _differentiable(outputs):
    return [x for x in as_tuple(outputs) if x.requires_grad]


def _gradient(output):
    """Make the same gradient for every peer: exact in bf16, and one for a scalar loss."""
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
    """Leave NaN in the memory that the peer will get for its outputs."""
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
