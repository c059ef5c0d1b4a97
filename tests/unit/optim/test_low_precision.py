import pytest
import torch

from mindspeed.optim.low_precision import decode, encode


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 0.0), (torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.uint8, 2**-4)],
)
def test_round_trip_of_small_numbers(dtype, error):
    # Second moments are tiny: without a scale float16 would flush these to zero.
    value = torch.rand(1000) * 1e-9 + 1e-10
    stored, scale = encode(value, dtype)
    assert stored.dtype == dtype
    assert stored.element_size() == dtype.itemsize
    torch.testing.assert_close(decode(stored, scale), value, rtol=error, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(0)])
def test_zeros_and_nothing(dtype, value):
    assert torch.equal(decode(*encode(value, dtype)), value)
