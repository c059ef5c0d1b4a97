"""Operations of the GPU's own operators equal closed forms; backward runs on another thread."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mindspeed.ops import npu_gmm, npu_matmul_add_fp32
from mindspeed.tune.flop_counter import FlopCounter, marks_recompute

HALF = {"device": "cuda", "dtype": torch.bfloat16}
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_attention_of_every_backend(backend, is_causal):
    q, k, v = (torch.randn(2, 4, 256, 64, **HALF, requires_grad=True) for _ in "qkv")
    with FlopCounter() as counter, sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        forward = counter.flops.model
        out.sum().backward()
    expected = 4 * 2 * 4 * 256 * 256 * 64 / (2 if is_causal else 1)
    assert forward == expected
    assert counter.flops.model == counter.flops.hardware == 3 * expected


def test_recomputed_attention_counts_as_hardware_flops_only():
    q, k, v = (torch.randn(2, 4, 256, 64, **HALF, requires_grad=True) for _ in "qkv")

    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    with FlopCounter() as counter:
        checkpoint(marks_recompute(attend), q, k, v, use_reentrant=True).sum().backward()
    forward = 4 * 2 * 4 * 256 * 256 * 64 / 2
    assert counter.flops.model == 3 * forward
    assert counter.flops.hardware - counter.flops.model == forward


def test_grouped_gemms_and_weight_gradients():
    x = torch.randn(48, 64, **HALF, requires_grad=True)
    weight = torch.randn(3, 64, 32, **HALF, requires_grad=True)
    ends = torch.tensor([16, 16, 48], device="cuda")
    with FlopCounter() as counter:
        npu_gmm(x, weight, group_list=ends).sum().backward()
    assert counter.flops.model == 3 * 2 * 48 * 64 * 32
    x, grad, main_grad = x.detach(), torch.randn(48, 32, **HALF), torch.zeros(32, 64, device="cuda")
    npu_matmul_add_fp32(x, grad, main_grad)  # the first call also tries what this torch can add
    with FlopCounter() as counter:
        npu_matmul_add_fp32(x, grad, main_grad)
    assert counter.flops.model == 2 * 48 * 64 * 32
