"""A SwiGLU MLP without biases: SwiGLU between two GEMMs, or inside them."""

import torch
from op_case import GEMMS, Case, Work, compiled, run_pass
from torch.nn.functional import linear as matmul

from mindspeed.device.hopper import QUACK
from mindspeed.ops.swiglu import gemm_swiglu, swiglu
from mindspeed.parallel.tensor import linear, linear_swiglu, swiglu_linear


def eager(x, first, second):
    """Run the MLP in eager torch."""
    gate, up = matmul(x, first).chunk(2, dim=-1)
    return matmul(torch.nn.functional.silu(gate) * up, second)


def apart(x, first, second):
    """Run the layers of the TE spec without quack-kernels."""
    preact = linear(x, first)
    return swiglu_linear(preact, swiglu(preact), second)


def in_epilogue(x, first, second):
    """Run them with quack-kernels: SwiGLU in the epilogue of the GEMMs."""
    preact, y = linear_swiglu(x, first)
    return swiglu_linear(preact, gemm_swiglu.with_gradient(y, preact), second)


def gemms_alone(x, first, second):
    """Run the GEMMs forward and backward, and nothing else."""
    middle = torch.randn_like(x[:, :1]).expand(-1, second.shape[1]).clone().requires_grad_()

    def both(x, first, middle, second):
        return matmul(x, first), matmul(middle, second)

    inputs = x, first, middle, second
    return {which: run_pass(both, inputs, which) for which in ("fwd", "bwd", "full")}


def case(tokens, hidden, ffn, dtype=torch.bfloat16):
    """Measure one MLP."""

    def of_size(count):
        def make_inputs(device):
            sizes = (count, hidden), (2 * ffn, hidden), (hidden, ffn)
            x, first, second = (torch.randn(size, device=device, dtype=dtype) for size in sizes)
            first, second = first / hidden**0.5, second / ffn**0.5
            return tuple(each.requires_grad_() for each in (x, first, second))

        return make_inputs

    forward = Work(flops=6 * tokens * hidden * ffn)
    backward = forward + forward
    return Case(
        op="swiglu_mlp",
        shape=f"{tokens}x{hidden}x{ffn}",
        dtype=dtype,
        make_inputs=of_size(tokens),
        gate_inputs=of_size(min(tokens, 1024)),
        peers={
            "ours": in_epilogue if QUACK.is_here() else apart,
            "swiglu apart": apart if QUACK.is_here() else None,
            "eager": eager,
            "compile": compiled(eager),
        },
        reference=eager,
        lower_bounds={GEMMS: gemms_alone},
        work={"fwd": forward, "bwd": backward, "full": forward + backward},
    )


CASES = [case(8192, 1536, 8960), case(8192, 4096, 14336)]
TINY = [case(24, 16, 24, torch.float32)]
