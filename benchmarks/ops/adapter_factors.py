"""Factors of all adapters of a layer as two matrices, and their gradients: a launch each."""

import functools

import torch
from op_case import Case, Work

from mindspeed.ops.adapter_factors import add_factor_gradients, join_factors, reference
from mindspeed.ops.adapter_factors.reference import FactorLayout


@functools.cache
def layout_of(sizes, device):
    """Return where factors of projections with these rows are, in reverse order."""
    rows = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    order = torch.arange(sum(sizes)).flip(0)
    return FactorLayout(rows, sum(sizes), 2.0, order=order, device=device)


def through(join, add):
    """Return a function that joins factors, and adds what was joined to gradients."""

    def run(inner, outer, inner_grads, outer_grads):
        layout = layout_of(tuple(map(len, outer)), inner[0].device)
        joined = join(inner, outer, layout)
        add(*joined, inner_grads, outer_grads, layout)
        return *joined, *inner_grads, *outer_grads

    return run


def by_hand(inner, outer, inner_grads, outer_grads):
    """Do the same block by block."""
    for total, part in zip(inner_grads, inner):
        total.add_(part)
    for total, part in zip(outer_grads, outer):
        total.add_(part, alpha=4.0)
    joined = (2.0 * torch.block_diag(*outer)).flip(0)
    return torch.cat(inner), joined, *inner_grads, *outer_grads


def case(sizes, rank, width, dtype=torch.bfloat16):
    """Measure one layer."""

    def make_inputs(device):
        shapes = [(rank, width)] * len(sizes), [(size, rank) for size in sizes]
        factors = [[torch.randn(*s, device=device, dtype=dtype) for s in part] for part in shapes]
        return *factors, *([torch.rand(*s, device=device) for s in part] for part in shapes)

    elements = len(sizes) * rank * width + sum(sizes) * rank
    joined = len(sizes) * rank * (width + sum(sizes))
    moved = (2 * elements + joined) * dtype.itemsize + 2 * elements * torch.float32.itemsize
    return Case(
        op="adapter_factors",
        shape=f"{'+'.join(map(str, sizes))}x{width}, rank {rank}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={
            "ours": through(join_factors, add_factor_gradients),
            "eager": through(reference.join_factors, reference.add_factor_gradients),
        },
        reference=by_hand,
        work={"fwd": Work(bytes=moved)},
    )


CASES = [case((1536, 256, 256), 16, 1536), case((8960, 8960), 16, 1536), case((1536,), 16, 8960)]
TINY = [case((8, 4, 4), 3, 6, torch.float32)]
