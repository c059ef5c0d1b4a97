"""Grouped products: every row, every matrix and the result once; two products more backward."""

import torch
from op_case import PRODUCTS, Case, Work, optional
from op_gate import run_pass

from mindspeed.ops.gmm import gmm
from mindspeed.ops.groupmatmul_add_fp32 import groupmatmul_add_fp32


def random_ends(rows, groups, device):
    """Draw a group for each row, as a router does, and return where each group ends."""
    counts = torch.randint(groups, (rows,), device=device).bincount(minlength=groups)
    return counts.cumsum(0).to(torch.int32)


def loop(x, weight, ends):
    """Multiply group by group, whose sizes the host has to know."""
    bounds = [0, *ends.tolist()]
    pieces = [x[a:b] @ w for a, b, w in zip(bounds, bounds[1:], weight, strict=False)]
    return torch.cat(pieces)


def one_matrix(x, weight, ends):
    """Multiply all rows by one matrix: as many FLOPs in products that cuBLAS knows best."""
    inputs = x, weight[0].detach().requires_grad_()
    return {which: run_pass(torch.mm, inputs, which) for which in ("fwd", "bwd", "full")}


def case(rows, wide_in, wide_out, groups, dtype=torch.bfloat16):
    """Race one shape."""
    grouped_mm = optional("torch:_grouped_mm")

    def make_inputs(device):
        x = torch.randn(rows, wide_in, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn(groups, wide_in, wide_out, device=device, dtype=dtype)
        return x, weight.requires_grad_(), random_ends(rows, groups, device)

    item, matrices = dtype.itemsize, groups * wide_in * wide_out
    one_pass = Work(
        bytes=item * (rows * (wide_in + wide_out) + matrices), flops=2 * rows * wide_in * wide_out
    )
    return Case(
        op="gmm",
        shape=f"{rows}x{wide_in}x{wide_out}/{groups}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={
            "ours": lambda x, w, ends: gmm(x, w, group_list=ends),
            "grouped_mm": grouped_mm and (lambda x, w, ends: grouped_mm(x, w, offs=ends)),
            "loop": loop,
        },
        reference=loop,
        yardsticks={PRODUCTS: one_matrix},
        work={"fwd": one_pass, "bwd": one_pass + one_pass, "full": one_pass + one_pass + one_pass},
    )


def accumulation(rows, wide_in, wide_out, groups, dtype=torch.bfloat16):
    """Race the weight gradients of one shape, added to float32."""

    def make_inputs(device):
        x = torch.randn(rows, wide_in, device=device, dtype=dtype)
        dy = torch.randn(rows, wide_out, device=device, dtype=dtype)
        total = torch.randn(groups, wide_in, wide_out, device=device)
        return x, dy, random_ends(rows, groups, device), total

    def ours(x, dy, ends, total):
        groupmatmul_add_fp32(x, dy, ends, total)
        return total

    def rounded_and_added(x, dy, ends, total):
        return total.add_(torch._grouped_mm(x.t(), dy, offs=ends))

    def one_by_one(x, dy, ends, total):
        bounds = [0, *ends.tolist()]
        for a, b, one in zip(bounds, bounds[1:], total, strict=False):
            one.add_(x[a:b].t() @ dy[a:b])
        return total

    matrices = groups * wide_in * wide_out
    return Case(
        op="groupmatmul_add_fp32",
        shape=f"{rows}x{wide_in}x{wide_out}/{groups}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={
            "ours": ours,
            "grouped_mm + add": rounded_and_added if dtype == torch.bfloat16 else None,
            "loop": one_by_one,
        },
        reference=one_by_one,
        yardsticks={PRODUCTS: lambda x, dy, ends, total: {"fwd": lambda: x.t() @ dy}},
        work={
            "fwd": Work(
                bytes=dtype.itemsize * rows * (wide_in + wide_out) + 8 * matrices,
                flops=2 * rows * wide_in * wide_out,
            )
        },
    )


SHAPES = [
    (65536, 2048, 1536, 128),
    (65536, 768, 2048, 128),
    (131072, 2048, 2048, 64),
    (16384, 4096, 28672, 8),
    (16384, 14336, 4096, 8),
]
CASES = [make(*shape) for shape in SHAPES for make in (case, accumulation)]
TINY = [make(24, 16, 8, 3, torch.float32) for make in (case, accumulation)]
