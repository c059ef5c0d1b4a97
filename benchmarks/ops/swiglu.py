"""SwiGLU: gate and up read and y written forward; dy, gate and up read, both gradients written."""

import torch
from op_case import Case, Work, compiled, optional

from mindspeed.ops.swiglu import swiglu


def eager(x, bias, weights):
    """Multiply as torch does."""
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate) * up
    return y if weights is None else (y * weights).to(x.dtype)


def ours(x, bias, weights):
    """Multiply in one kernel."""
    return swiglu(x, bias=bias, weights=weights)


def megatron_peer():
    """Multiply as Megatron's local layers and experts do."""
    with_bias = optional("megatron.core.fusions.fused_bias_swiglu:bias_swiglu_impl")
    weighted = optional("megatron.core.fusions.fused_bias_swiglu:weighted_bias_swiglu_impl")

    def multiply(x, bias, weights):
        return with_bias(x, bias) if weights is None else weighted(x, bias, weights)

    return with_bias and weighted and multiply


def case(rows, ffn, dtype=torch.bfloat16, variant=""):
    """Measure one shape, with a "bias" or "weighted" as in a mixture of experts."""
    liger = None if variant else optional("liger_kernel.ops.swiglu:LigerSiLUMulFunction")

    def make_inputs(device):
        x = torch.randn(rows, 2 * ffn, device=device, dtype=dtype, requires_grad=True)
        bias = weights = None
        if variant == "bias":
            bias = torch.randn(2 * ffn, device=device, dtype=dtype, requires_grad=True)
        if variant == "weighted":
            weights = torch.rand(rows, 1, device=device, requires_grad=True)
        return x, bias, weights

    def liger_swiglu(x, bias, weights):
        gate, up = x.chunk(2, dim=-1)
        return liger.apply(gate, up)

    tensor = rows * ffn * dtype.itemsize
    work = {"fwd": Work(bytes=3 * tensor), "bwd": Work(bytes=5 * tensor)}
    return Case(
        op=f"swiglu_{variant}" if variant else "swiglu",
        shape=f"{rows}x{ffn}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={
            "ours": ours,
            "eager": eager,
            "compile": compiled(eager),
            "liger": liger and liger_swiglu,
            "megatron-core": megatron_peer(),
        },
        reference=eager,
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


CASES = [
    case(256, 8960),  # launch-bound
    case(8192, 8960),
    case(8192, 14336),
    case(16384, 28672),
    case(8192, 14336, variant="bias"),
    case(65536, 1024, variant="weighted"),
]
TINY = [case(5, 24, torch.float32, variant) for variant in ("", "bias", "weighted")]
