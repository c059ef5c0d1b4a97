"""RMSNorm, residual + RMSNorm and dropout + residual + LayerNorm.

Minimum traffic. RMSNorm: x and y forward; x, dy and dx backward. With a residual: two reads and two
writes each way. With dropout: x, residual, sum and result forward; five tensors backward.
"""

import torch
from op_case import Case, Work, compiled, optional

from mindspeed.ops.norm import add_rms_norm, dropout_add_layer_norm, rms_norm

EPS, LAYER_NORM_EPS = 1e-6, 1e-5


def rms_norm_eager(x, weight):
    """Normalise as torch does."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


def rms_norm_case(rows, hidden, dtype=torch.bfloat16):
    """Measure one shape."""
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
            "eager": rms_norm_eager,
            "compile": compiled(rms_norm_eager),
            "liger": liger and (lambda x, weight: liger(x, weight, EPS)),
        },
        reference=rms_norm_eager,
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


def add_rms_norm_eager(x, residual, gamma):
    """Add, then normalise as torch does."""
    total = x + residual
    return torch.nn.functional.rms_norm(total, gamma.shape, gamma, EPS), total


def add_rms_norm_case(rows, hidden, dtype=torch.bfloat16):
    """Measure one shape."""
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
            "eager": add_rms_norm_eager,
            "compile": compiled(add_rms_norm_eager),
            "liger": liger and (lambda x, residual, gamma: liger(x, residual, gamma, EPS)),
        },
        reference=add_rms_norm_eager,
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


def dropout_add_norm_ours(x, residual, weight, bias, dropout):
    """Drop, add and normalise in one kernel, which draws the same mask again in backward."""
    return dropout_add_layer_norm(x, residual, weight, bias, dropout, LAYER_NORM_EPS, prenorm=True)


def dropout_add_norm_eager(x, residual, weight, bias, dropout):
    """Drop, add and normalise as torch does."""
    total = torch.nn.functional.dropout(x, dropout) + residual
    return torch.nn.functional.layer_norm(total, weight.shape, weight, bias, LAYER_NORM_EPS), total


def without_dropout(x, residual, weight, bias, dropout):
    """Skip the dropout: the part that can be checked against float64."""
    total = x + residual
    return torch.nn.functional.layer_norm(total, weight.shape, weight, bias, LAYER_NORM_EPS), total


def dropout_add_norm_case(rows, hidden, dropout, dtype=torch.bfloat16):
    """Measure one shape."""
    megatron_add = optional("megatron.core.fusions.fused_bias_dropout:bias_dropout_add_fused_train")

    def inputs_with(dropout):
        def make_inputs(device):
            x, residual = (torch.randn(rows, hidden, device=device, dtype=dtype) for _ in range(2))
            weight, bias = (torch.rand(hidden, device=device, dtype=dtype) + 0.5 for _ in range(2))
            return *(t.requires_grad_() for t in (x, residual, weight, bias)), dropout

        return make_inputs

    def megatron(x, residual, weight, bias, dropout):
        total = megatron_add((x, None), residual, dropout)
        return torch.nn.functional.layer_norm(
            total, weight.shape, weight, bias, LAYER_NORM_EPS
        ), total

    tensor = rows * hidden * dtype.itemsize
    work = {"fwd": Work(bytes=4 * tensor), "bwd": Work(bytes=(5 if dropout else 4) * tensor)}
    return Case(
        op="dropout_add_layer_norm",
        shape=f"{rows}x{hidden} p={dropout}",
        dtype=dtype,
        make_inputs=inputs_with(dropout),
        gate_inputs=inputs_with(0.0),  # every peer draws another mask
        peers={
            "ours": dropout_add_norm_ours,
            "eager": dropout_add_norm_eager,
            "compile": compiled(dropout_add_norm_eager),
            "megatron-core": megatron_add and megatron,
        },
        reference=without_dropout,
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


LARGE = [(8192, 4096), (8192, 8192), (16384, 4096), (16384, 8192)]
CASES = [
    rms_norm_case(256, 1536),  # launch-bound
    rms_norm_case(8192, 1536),
    *(rms_norm_case(*shape) for shape in LARGE),
    add_rms_norm_case(8192, 1536),
    *(add_rms_norm_case(*shape) for shape in LARGE),
    dropout_add_norm_case(8192, 4096, 0.0),
    *(dropout_add_norm_case(*shape, 0.1) for shape in LARGE),
]
TINY = [
    rms_norm_case(5, 24, torch.float32),
    add_rms_norm_case(5, 24, torch.float32),
    dropout_add_norm_case(5, 24, 0.1, torch.float32),
]
