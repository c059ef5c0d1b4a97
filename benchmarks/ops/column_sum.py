"""The gradient of a bias: a matrix is read once."""

import torch
from op_case import Case, Work, compiled

from mindspeed.ops.column_sum import column_sum


def eager(x):
    """Sum as torch does."""
    return x.sum(0)


def case(rows, columns, dtype=torch.bfloat16):
    """Race one shape."""
    return Case(
        op="column_sum",
        shape=f"{rows}x{columns}",
        dtype=dtype,
        make_inputs=lambda device: (torch.randn(rows, columns, device=device, dtype=dtype),),
        peers={"ours": column_sum, "eager": eager, "compile": compiled(eager)},
        reference=eager,
        work={"fwd": Work(bytes=(rows + 1) * columns * dtype.itemsize)},
    )


CASES = [case(8192, 2048), case(8192, 6144), case(16384, 17920)]
TINY = [case(40, 6, torch.float32)]
