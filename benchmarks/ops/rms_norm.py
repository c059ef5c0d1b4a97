"""RMSNorm: one read and one write forward; x, dy and dx backward."""

import torch
from op_case import Case, Work, compiled, optional

from mindspeed.ops.norm import rms_norm

EPS = 1e-6


def eager(x, weight):
    """Normalise as torch does."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


def case(rows, hidden, dtype=torch.bfloat16):
    """Race one shape."""
    liger = optional("liger_kernel.transformers.functional:liger_rms_norm")

    def make_inputs(device):
        x = torch.randn(rows, hidden, device=device, dtype=dtype, requires_grad=True)
        weight = torch.rand(hidden, device=device, dtype=dtype) + 0.5
        return x, weight.requires_grad_()

    tensor = rows * hidden * dtype.itemsize
    work = {"fwd": Work(bytes=2 * tensor), "bwd": Work(bytes=3 * tensor)}
    return Case(
        op="rms_norm",
        shape=f"{rows}x{hidden}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={
            "ours": lambda x, weight: rms_norm(x, weight, EPS),
            "eager": eager,
            "compile": compiled(eager),
            "liger": liger and (lambda x, weight: liger(x, weight, EPS)),
        },
        reference=eager,
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


CASES = [
    case(256, 1536),  # launch-bound
    case(8192, 1536),
    case(8192, 4096),
    case(8192, 8192),
    case(16384, 4096),
    case(16384, 8192),
]
TINY = [case(5, 24, torch.float32)]
