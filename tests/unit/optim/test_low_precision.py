import pytest
import torch

from mindspeed.optim.low_precision import decode, encode, join_master, split_master


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


def test_master_is_split_without_loss():
    torch.manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int64).to(torch.int32)
    master = any_bits.view(torch.float32)
    master = master[master.isfinite()]
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3.3e38, -3.3e38])
    master = torch.cat([master, edges])
    param, remainder = split_master(master)
    assert param.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    assert torch.equal(join_master(param, remainder).view(torch.int32), master.view(torch.int32))


def test_parameter_is_the_nearest_bfloat16():
    master = torch.randn(10_000)
    param, _ = split_master(master)
    rounded = master.bfloat16()
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(param[~tie], rounded[~tie])
