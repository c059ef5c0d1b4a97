"""Dropout, residual and LayerNorm: x, residual, sum and result forward; five tensors backward."""

import torch
from op_case import Case, Work, compiled, optional

from mindspeed.ops.norm import dropout_add_layer_norm

EPS = 1e-5


def ours(x, residual, weight, bias, dropout):
    """Drop, add and normalise in one kernel, which draws the same mask again in backward."""
    return dropout_add_layer_norm(x, residual, weight, bias, dropout, EPS, prenorm=True)


def eager(x, residual, weight, bias, dropout):
    """Drop, add and normalise as torch does."""
    total = torch.nn.functional.dropout(x, dropout) + residual
    return torch.nn.functional.layer_norm(total, weight.shape, weight, bias, EPS), total


def exact(x, residual, weight, bias, dropout):
    """Leave the dropout out: what can be checked against float64."""
    total = x + residual
    return torch.nn.functional.layer_norm(total, weight.shape, weight, bias, EPS), total


def case(rows, hidden, dropout, dtype=torch.bfloat16):
    """Race one shape."""
    megatron_add = optional("megatron.core.fusions.fused_bias_dropout:bias_dropout_add_fused_train")

    def inputs_with(dropout):
        def make_inputs(device):
            x, residual = (torch.randn(rows, hidden, device=device, dtype=dtype) for _ in range(2))
            weight, bias = (torch.rand(hidden, device=device, dtype=dtype) + 0.5 for _ in range(2))
            return *(t.requires_grad_() for t in (x, residual, weight, bias)), dropout

        return make_inputs

    def megatron(x, residual, weight, bias, dropout):
        total = megatron_add((x, None), residual, dropout)
        return torch.nn.functional.layer_norm(total, weight.shape, weight, bias, EPS), total

    tensor = rows * hidden * dtype.itemsize
    work = {"fwd": Work(bytes=4 * tensor), "bwd": Work(bytes=(5 if dropout else 4) * tensor)}
    return Case(
        op="dropout_add_layer_norm",
        shape=f"{rows}x{hidden} p={dropout}",
        dtype=dtype,
        make_inputs=inputs_with(dropout),
        gate_inputs=inputs_with(0.0),  # every peer draws another mask
        peers={
            "ours": ours,
            "eager": eager,
            "compile": compiled(eager),
            "megatron-core": megatron_add and megatron,
        },
        reference=exact,
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


SHAPES = [(8192, 4096), (8192, 8192), (16384, 4096), (16384, 8192)]
CASES = [case(8192, 4096, 0.0), *(case(*shape, 0.1) for shape in SHAPES)]
TINY = [case(5, 24, 0.1, torch.float32)]
