"""Bytes that operators keep for backward, and the most that backward holds, by closed forms."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.gmm import gmm
from mindspeed.ops.norm import add_rms_norm, dropout_add_layer_norm, layer_norm
from mindspeed.ops.ring_attention_update import ring_attention_update
from mindspeed.ops.rotary_position_embedding import rotate_qk

pytestmark = pytest.mark.gpu
ROWS, HIDDEN, FLOAT = 4096, 4096, 4
TENSOR = 2 * ROWS * HIDDEN
PARTIAL = 256 * HIDDEN * FLOAT  # a norm's programs each keep a sum of the weight's gradient
SLACK = 2**20


def half(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def add_norm():
    given = half(ROWS, HIDDEN), half(ROWS, HIDDEN), half(HIDDEN)
    # The norm and the sum are results; one number a row is kept.
    return add_rms_norm, given, 2 * TENSOR + ROWS * FLOAT, TENSOR + PARTIAL


def norm():
    given = half(ROWS, HIDDEN), half(HIDDEN), half(HIDDEN)
    return layer_norm, given, TENSOR + 2 * ROWS * FLOAT, TENSOR + 2 * PARTIAL


def dropped_norm():
    given = half(ROWS, HIDDEN), half(ROWS, HIDDEN), half(HIDDEN), half(HIDDEN)

    def run(x, residual, weight, bias):
        return dropout_add_layer_norm(x, residual, weight, bias, 0.1, 1e-5, prenorm=True)

    # No mask: the gradients of x and of the residual are two tensors.
    return run, given, 2 * TENSOR + 2 * ROWS * FLOAT, 2 * TENSOR + 2 * PARTIAL


def rotary():
    q, k = half(ROWS // 2, 2, 32, 128), half(ROWS // 2, 2, 8, 128)
    freqs = torch.randn(ROWS // 2, 1, 1, 128, device="cuda")
    both = q.nbytes + k.nbytes
    return lambda q, k: rotate_qk(q, k, freqs), (q, k), both, both


def gemms():
    rows, weight = half(ROWS, 512), half(8, 512, 1024)
    ends = torch.arange(1, 9, device="cuda", dtype=torch.int32) * (ROWS // 8)
    run = lambda x, w: gmm(x, w, group_list=ends)  # noqa: E731
    return run, (rows, weight), 2 * ROWS * 1024, rows.nbytes + weight.nbytes


@pytest.mark.parametrize("make", [add_norm, norm, dropped_norm, rotary, gemms])
def test_forward_and_backward(make):
    run, given, kept, more = make()
    here = device.current()
    for _ in range(2):  # tables and workspaces are made once
        before = here.memory_allocated()
        here.reset_peak_memory()
        outs = run(*given)
        outs = outs if isinstance(outs, tuple) else (outs,)
        forward = here.memory_allocated() - before
        grads = [torch.ones_like(out) for out in outs]
        at_backward = here.memory_allocated()
        here.reset_peak_memory()
        torch.autograd.grad(outs, given, grads)
        backward = here.max_memory_allocated() - at_backward
        del outs, grads
    assert abs(forward - kept) <= 64 * 1024
    assert backward <= more + SLACK


def test_a_merge_holds_its_results_only():
    out = torch.randn(2048, 2, HIDDEN, device="cuda")
    statistics = [torch.rand(2, 32, 2048, 8, device="cuda") for _ in range(4)]
    given = out, *statistics[:2], out.bfloat16(), *statistics[2:]
    ring_attention_update(*given)
    before = requested_bytes("current")
    device.current().reset_peak_memory()
    ring_attention_update(*given)
    results = out.nbytes + 2 * statistics[0].nbytes
    assert requested_bytes("peak") - before <= results + 64 * 1024


def requested_bytes(kind):
    """Return what was asked for: a free block up to 1 MiB larger is handed out, and counted, whole.

    Which blocks are free depends on the tests before.
    """
    return torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"]
