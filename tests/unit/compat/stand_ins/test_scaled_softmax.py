"""Megatron's fused softmax, with and without its kernels, against float64."""

import pytest
import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import attention_mask_func

SCALE = 0.37


def _hidden(kind: str, masked: bool) -> torch.Tensor:
    """Return what is hidden from each of 20 queries of 2 samples; no query sees nothing."""
    if kind == "causal":
        return torch.ones(20, 20, dtype=torch.bool).triu(1).expand(2, 1, 20, 20)
    hidden = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(1)) < 0.3
    return hidden & masked & ~torch.eye(20, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "masked"), [("causal", False), ("padding", True), ("padding", False)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_equal_float64(kind: str, masked: bool, dtype: torch.dtype) -> None:
    """A local layer spec in half precision finds the three kernels, and they are right."""
    softmax = FusedScaleMaskSoftmax(
        input_in_fp16=dtype is torch.float16,
        input_in_bf16=dtype is torch.bfloat16,
        attn_mask_type=AttnMaskType[kind],
        scaled_masked_softmax_fusion=True,
        mask_func=attention_mask_func,
        softmax_in_fp32=True,
        scale=SCALE,
    )
    torch.manual_seed(0)
    scores = (3 * torch.randn(2, 4, 20, 20)).to(dtype).requires_grad_()
    hidden = _hidden(kind, masked)
    mask = hidden if masked else None
    assert softmax.is_kernel_available(mask, *scores.shape)
    weights = softmax(scores, mask)
    outer = torch.randn_like(weights)
    weights.backward(outer)

    exact = scores.detach().double().requires_grad_()
    wanted = torch.softmax((exact * SCALE).masked_fill(hidden, -torch.inf), -1)
    wanted.backward(outer.double())
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(weights.double(), wanted.detach(), rtol=step, atol=step / 8)
    torch.testing.assert_close(scores.grad.double(), exact.grad, rtol=2 * step, atol=step)
