"""SwiGLU: gate and up read and y written forward; dy, gate and up read, both gradients written."""

import torch
from op_case import Case, Work, compiled, optional

from mindspeed.ops.swiglu import swiglu


def eager(x, *weights):
    """Multiply as torch does."""
    gate, up = x.chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate) * up
    return (y * weights[0]).to(x.dtype) if weights else y


def case(rows, ffn, dtype=torch.bfloat16, weighted=False):
    """Race one shape; weighted as in a mixture of experts."""
    liger = optional("liger_kernel.ops.swiglu:LigerSiLUMulFunction")
    mcore = optional("megatron.core.fusions.fused_bias_swiglu:SwiGLUFunction")

    def make_inputs(device):
        x = torch.randn(rows, 2 * ffn, device=device, dtype=dtype, requires_grad=True)
        if not weighted:
            return (x,)
        return x, torch.rand(rows, 1, device=device, requires_grad=True)

    def liger_swiglu(x):
        gate, up = x.chunk(2, dim=-1)
        return liger.apply(gate, up)

    tensor = rows * ffn * dtype.itemsize
    work = {"fwd": Work(bytes=3 * tensor), "bwd": Work(bytes=5 * tensor)}
    return Case(
        op="swiglu_weighted" if weighted else "swiglu",
        shape=f"{rows}x{ffn}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={
            "ours": lambda x, *weights: swiglu(x, weights=weights[0] if weights else None),
            "eager": eager,
            "compile": compiled(eager),
            "liger": None if weighted or liger is None else liger_swiglu,
            "megatron-core": None
            if weighted or mcore is None
            else lambda x: mcore.apply(x, False, False),
        },
        reference=eager,
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


CASES = [
    case(256, 8960),  # launch-bound
    case(8192, 8960),
    case(8192, 14336),
    case(16384, 28672),
    case(65536, 1024, weighted=True),
]
TINY = [case(5, 24, torch.float32), case(5, 24, torch.float32, weighted=True)]
