import pytest
import torch

from mindspeed.te.pytorch.optimizers import (
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_unscale_l2norm,
)

FLAG = torch.zeros(1, dtype=torch.int)


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(s).to(dtype) for s in [(3, 4), (7,), (), (0,)]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_of_all_and_of_each(dtype):
    given = tensors(dtype)
    total, each = multi_tensor_applier(multi_tensor_l2norm, FLAG, [given], True)
    want = torch.stack([t.double().square().sum().sqrt() for t in given])
    assert total.shape == (1,) and each.shape == (4,)
    torch.testing.assert_close(each.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        total.double(), want.square().sum().sqrt().view(1), rtol=1e-6, atol=0
    )
    assert multi_tensor_applier(multi_tensor_l2norm, FLAG, [given], False)[1] is None


def test_norms_after_unscaling():
    given = tensors()
    total, each = multi_tensor_applier(
        multi_tensor_unscale_l2norm, FLAG, [given], torch.tensor([0.25]), True
    )
    want, want_each = multi_tensor_l2norm(0, FLAG, [[t * 0.25 for t in given]], True)
    torch.testing.assert_close((total, each), (want, want_each))


@pytest.mark.parametrize(
    ("function", "scale"),
    [(multi_tensor_scale, 0.3), (multi_tensor_scale_tensor, torch.tensor([0.3]))],
)
def test_scale_in_place_and_into_another_dtype(function, scale):
    given = tensors()
    want = [t * 0.3 for t in given]
    targets = [torch.empty_like(t, dtype=torch.bfloat16) for t in given]
    multi_tensor_applier(function, FLAG, [given, targets], scale)
    assert all(torch.equal(t, w.bfloat16()) for t, w in zip(targets, want))
    multi_tensor_applier(function, FLAG, [given, given], scale)
    torch.testing.assert_close(given, want)


def test_scale_by_one_copies():
    given, targets = tensors(torch.bfloat16), tensors()
    multi_tensor_applier(multi_tensor_scale, FLAG, [given, targets], 1.0)
    assert all(torch.equal(t, g.float()) for t, g in zip(targets, given))
