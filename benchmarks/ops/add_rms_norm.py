"""Residual and RMSNorm: two reads and two writes each way."""

import torch
from op_case import Case, Work, compiled, optional

from mindspeed.ops.norm import add_rms_norm

EPS = 1e-6


def eager(x, residual, gamma):
    """Add, then normalise as torch does."""
    total = x + residual
    return torch.nn.functional.rms_norm(total, gamma.shape, gamma, EPS), total


def case(rows, hidden, dtype=torch.bfloat16):
    """Race one shape."""
    liger = optional("liger_kernel.transformers.functional:liger_fused_add_rms_norm")

    def make_inputs(device):
        x, residual = (torch.randn(rows, hidden, device=device, dtype=dtype) for _ in range(2))
        gamma = torch.rand(hidden, device=device, dtype=dtype) + 0.5
        return x.requires_grad_(), residual.requires_grad_(), gamma.requires_grad_()

    tensor = rows * hidden * dtype.itemsize
    work = {"fwd": Work(bytes=4 * tensor), "bwd": Work(bytes=4 * tensor)}
    return Case(
        op="add_rms_norm",
        shape=f"{rows}x{hidden}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={
            "ours": lambda x, residual, gamma: add_rms_norm(x, residual, gamma, EPS),
            "eager": eager,
            "compile": compiled(eager),
            "liger": liger and (lambda x, residual, gamma: liger(x, residual, gamma, EPS)),
        },
        reference=eager,
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


SHAPES = [(8192, 1536), (8192, 4096), (8192, 8192), (16384, 4096), (16384, 8192)]
CASES = [case(*shape) for shape in SHAPES]
TINY = [case(5, 24, torch.float32)]
