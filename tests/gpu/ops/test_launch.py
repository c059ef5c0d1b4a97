"""A kernel started by its known binary does what it does when Triton inspects every argument."""

import pytest
import torch
import triton
import triton.language as tl

from mindspeed.ops.launch import launch

pytestmark = pytest.mark.gpu


@triton.jit
def _scale(x_ptr, bias_ptr, y_ptr, count, step, factor, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + offs * step, mask=offs < count, other=0.0) * factor
    if bias_ptr is not None:
        value += tl.load(bias_ptr)
    tl.store(y_ptr + offs, value, mask=offs < count)


@pytest.mark.parametrize("round", range(2), ids=["first", "known"])
@pytest.mark.parametrize("start", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("step", [1, 3, 16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_argument(round, start, step, has_bias, block, dtype):
    for count, factor in ((1, 2.0), (112, 0.5), (333, 3.0)):
        x = torch.randn(start + count * step, device="cuda").to(dtype)[start:]
        bias = torch.randn(1, device="cuda").to(dtype) if has_bias else None
        y = torch.full((count + 5,), torch.nan, device="cuda", dtype=dtype)
        grid = (triton.cdiv(count, block),)
        launch(_scale, grid, x, bias, y, count, step, factor, BLOCK=block, num_warps=2)
        wanted = x[::step][:count].float() * factor + (0 if bias is None else bias.float())
        torch.testing.assert_close(y[:count].float(), wanted, rtol=2**-7, atol=2**-7)
        assert y[count:].isnan().all()
