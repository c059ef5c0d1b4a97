import pytest
import torch

from mindspeed.compat.stand_ins import fused_weight_gradient_mlp_cuda as fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_main_grad_accumulates_in_place(dtype):
    torch.manual_seed(0)
    x, grad = torch.randn(20, 6).to(dtype), torch.randn(20, 4).to(dtype)
    main_grad = torch.randn(4, 6)
    want = main_grad.double() + 2 * grad.double().T @ x.double()
    address = main_grad.data_ptr()
    for _ in range(2):
        assert fused.wgrad_gemm_accum_fp32(x, grad, main_grad) is None
    assert main_grad.data_ptr() == address
    # Products of bfloat16 numbers are exact in float32: no accuracy is lost before the sum.
    torch.testing.assert_close(main_grad.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_main_grad(dtype):
    torch.manual_seed(0)
    x, grad = torch.randn(5, 4, 6).to(dtype), torch.randn(5, 4, 3).to(dtype)
    main_grad = torch.zeros(3, 6, dtype=dtype)
    fused.wgrad_gemm_accum_fp16(x, grad, main_grad)
    want = torch.einsum("sbo,sbi->oi", grad.double(), x.double())
    torch.testing.assert_close(main_grad.double(), want, rtol=2e-2, atol=2e-2)
