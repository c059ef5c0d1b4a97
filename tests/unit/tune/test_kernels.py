"""GEMMs of our kernels are counted where the feature is on, recomputed ones separately."""

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is declared

import mindspeed  # noqa: E402
import mindspeed.megatron_adaptor  # noqa: E402, F401
from mindspeed.tune.flop_counter import FlopCounter  # noqa: E402

pytest.importorskip("triton", reason="kernels are written in triton, which has no build for macOS")


@pytest.fixture(autouse=True)
def counting():
    mindspeed.enable(op_cal_tflops=True)
    yield
    mindspeed.enable()


def test_weight_gradients_of_groups():
    from mindspeed.ops.groupmatmul_add_fp32.triton_impl import groupmatmul_add_fp32

    x, dy, out = torch.randn(8, 16), torch.randn(8, 24), torch.zeros(2, 16, 24)
    with FlopCounter() as counter:
        groupmatmul_add_fp32(x, dy, torch.tensor([3, 8]), out)
    assert counter.flops.hardware == counter.flops.model == 2 * 8 * 16 * 24


def test_logits_that_are_not_kept():
    """The vocabulary of three slices: one is saved, two are recomputed.

    With so many tokens none fits into the memory of the weight's gradient.
    """
    from mindspeed.ops.linear_cross_entropy.triton_impl import linear_cross_entropy

    tokens, hidden, width = 64, 8, 256
    rows = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(3 * width, hidden, requires_grad=True)
    labels = torch.randint(0, 3 * width, (tokens,))
    with FlopCounter() as counter:
        loss = linear_cross_entropy(rows, weight, labels, memory=tokens * width * 4)
        loss.mean().backward()
    matmul = 2 * tokens * hidden * 3 * width
    assert counter.flops.model == 3 * matmul
    assert counter.flops.hardware - counter.flops.model == matmul * 2 / 3
