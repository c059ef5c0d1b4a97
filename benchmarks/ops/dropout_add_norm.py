"""Dropout, residual and LayerNorm: x, residual, sum and result forward; five tensors backward."""

import torch
from op_case import Case, Work, compiled

from mindspeed.ops.dropout_add_norm import dropout_add_layer_norm

EPS, DROPOUT = 1e-5, 0.1


def exact(x, residual, weight, bias):
    """Leave the dropout out: what can be checked against float64."""
    total = x + residual
    return torch.nn.functional.layer_norm(total, weight.shape, weight, bias, EPS), total


def case(rows, hidden, dropout, dtype=torch.bfloat16):
    """Race one shape."""

    def make_inputs(device):
        x, residual = (torch.randn(rows, hidden, device=device, dtype=dtype) for _ in range(2))
        weight, bias = (torch.rand(hidden, device=device, dtype=dtype) + 0.5 for _ in range(2))
        return [t.requires_grad_() for t in (x, residual, weight, bias)]

    def eager(x, residual, weight, bias):
        total = torch.nn.functional.dropout(x, dropout) + residual
        return torch.nn.functional.layer_norm(total, weight.shape, weight, bias, EPS), total

    def ours(x, residual, weight, bias):
        return dropout_add_layer_norm(x, residual, weight, bias, dropout, EPS, prenorm=True)

    tensor = rows * hidden * dtype.itemsize
    work = {"fwd": Work(bytes=4 * tensor), "bwd": Work(bytes=(5 if dropout else 4) * tensor)}
    return Case(
        op="dropout_add_layer_norm",
        shape=f"{rows}x{hidden} p={dropout}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={"ours": ours, "eager": eager, "compile": compiled(eager)},
        reference=exact,
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


CASES = [case(8192, 4096, 0.0), case(16384, 4096, 0.0)]
TINY = [case(5, 24, 0.0, torch.float32)]
