"""Grouped GEMM: every row, every matrix and the output once; two GEMMs more backward."""

import torch
from op_case import GEMMS, Case, Work, optional, run_pass

from mindspeed import device
from mindspeed.ops.gmm import gmm
from mindspeed.ops.gmm.reference import Kernels, make_operators
from mindspeed.ops.groupmatmul_add_fp32 import groupmatmul_add_fp32


def random_ends(rows, groups, device):
    """Draw a group for each row, as a router does, and return the end of each group."""
    counts = torch.randint(groups, (rows,), device=device).bincount(minlength=groups)
    return counts.cumsum(0).to(torch.int32)


def loop(x, weight, ends):
    """Multiply group by group, with the group sizes on the host."""
    bounds = [0, *ends.tolist()]
    pieces = [x[a:b] @ w for a, b, w in zip(bounds, bounds[1:], weight, strict=False)]
    return torch.cat(pieces)


def one_matrix(x, weight, ends):
    """Multiply all rows by one matrix: the same FLOPs in one cuBLAS GEMM."""
    inputs = x, weight[0].detach().requires_grad_()
    return {which: run_pass(torch.mm, inputs, which) for which in ("fwd", "bwd", "full")}


def triton_gmm():
    """Return gmm by our Triton kernels alone, which "ours" uses as a fallback; None on a cpu."""
    if device.current().name == "cpu":
        return None
    from mindspeed.ops.gmm import triton_impl

    return make_operators(Kernels(triton_impl.rows, triton_impl.outer))[0]


def case(rows, width_in, width_out, groups, dtype=torch.bfloat16):
    """Measure one shape."""
    grouped_mm = optional("torch:_grouped_mm")
    triton = triton_gmm()

    def make_inputs(device):
        x = torch.randn(rows, width_in, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn(groups, width_in, width_out, device=device, dtype=dtype)
        return x, weight.requires_grad_(), random_ends(rows, groups, device)

    item, matrices = dtype.itemsize, groups * width_in * width_out
    one_pass = Work(
        bytes=item * (rows * (width_in + width_out) + matrices),
        flops=2 * rows * width_in * width_out,
    )
    return Case(
        op="gmm",
        shape=f"{rows}x{width_in}x{width_out}/{groups}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={
            "ours": lambda x, w, ends: gmm(x, w, group_list=ends),
            "grouped_mm": grouped_mm and (lambda x, w, ends: grouped_mm(x, w, offs=ends)),
            "our Triton": triton and (lambda x, w, ends: triton(x, w, group_list=ends)),
            "loop": loop,
        },
        reference=loop,
        lower_bounds={GEMMS: one_matrix},
        work={"fwd": one_pass, "bwd": one_pass + one_pass, "full": one_pass + one_pass + one_pass},
    )


def accumulation(rows, width_in, width_out, groups, dtype=torch.bfloat16):
    """Measure the weight gradients of one shape, added to float32."""

    def make_inputs(device):
        x = torch.randn(rows, width_in, device=device, dtype=dtype)
        dy = torch.randn(rows, width_out, device=device, dtype=dtype)
        total = torch.randn(groups, width_in, width_out, device=device)
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

    matrices = groups * width_in * width_out
    return Case(
        op="groupmatmul_add_fp32",
        shape=f"{rows}x{width_in}x{width_out}/{groups}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={
            "ours": ours,
            "grouped_mm + add": rounded_and_added if dtype == torch.bfloat16 else None,
            "loop": one_by_one,
        },
        reference=one_by_one,
        lower_bounds={GEMMS: lambda x, dy, ends, total: {"fwd": lambda: x.t() @ dy}},
        work={
            "fwd": Work(
                bytes=dtype.itemsize * rows * (width_in + width_out) + 8 * matrices,
                flops=2 * rows * width_in * width_out,
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
