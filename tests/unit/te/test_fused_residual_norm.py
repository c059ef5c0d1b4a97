"""What passes from a residual sum to the norm behind it, and when nothing does."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed.ops.norm import add_rms_norm, rms_norm, triton_impl
from mindspeed.te.fused_residual_norm import ResidualNorm
from mindspeed.te.pytorch.module import RMSNorm


@pytest.fixture
def norm():
    norm = RMSNorm(8, params_dtype=torch.float64)
    norm.residual_norm = ResidualNorm([norm])
    return norm


def draw():
    torch.manual_seed(2)
    return [torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]


def test_the_norm_of_a_sum_is_taken_once(norm):
    (x, residual), link = draw(), norm.residual_norm
    link.open()
    total = link.add(x, residual)
    assert torch.equal(total, x + residual)
    expected = link._normed
    assert norm(total) is expected
    assert link.take(total) is None
    torch.testing.assert_close(norm(total), expected)


def test_outside_of_a_forward_pass_nothing_is_added(norm):
    link = norm.residual_norm
    assert link.add(*draw()) is None
    link.open()
    link.add(*draw())
    link.close()
    assert link._normed is None and link.add(*draw()) is None


def replaced(total):
    return total.clone()


def changed(total):
    with torch.no_grad():
        return total.mul_(2)


@pytest.mark.parametrize("between", [replaced, changed])
def test_a_norm_of_another_tensor_is_its_own(norm, between):
    (x, residual), link = draw(), norm.residual_norm
    link.open()
    given = between(link.add(x, residual))
    expected = given / (given.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    torch.testing.assert_close(norm(given), expected)


def test_sums_whose_norms_are_not_taken_are_made_alone(norm):
    link = norm.residual_norm
    for is_made in (True, True, False, False):
        link.open()
        assert (link.add(*draw()) is not None) == is_made
        link.close()


def test_one_pass_that_fails_changes_nothing(norm):
    link = norm.residual_norm
    for is_taken in (False, True, False, True):
        link.open()
        total = link.add(*draw())
        assert not is_taken or link.take(total) is not None
        link.close()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_takes_nothing(norm, use_reentrant):
    (x, residual), link = draw(), norm.residual_norm
    link.open()
    total = link.add(x, residual)
    checkpoint(norm, total, use_reentrant=use_reentrant).sum().backward()
    assert link._normed is not None
    assert torch.equal(x.grad, residual.grad)


def test_sums_without_gradients_are_made_alone_in_training(norm):
    """As in the first run of a checkpoint, and where only the residual has one."""
    (x, residual), link = draw(), norm.residual_norm
    link.open()
    assert link.add(x.detach(), residual.detach()) is None
    norm.eval()
    assert link.add(x.detach(), residual) is None
    with torch.no_grad():
        assert link.add(x, residual) is None
    with torch.inference_mode():
        assert link.add(x.clone(), residual.clone()) is None


@torch.no_grad()
def test_the_kernel_of_both_has_the_bits_of_sum_and_norm():
    for dtype, add, plain in (
        (torch.bfloat16, add_rms_norm, rms_norm),
        (torch.float16, triton_impl.add_rms_norm, triton_impl.rms_norm),
    ):
        x, residual = (one.to(dtype) for one in draw())
        normed, total = add(x, residual, torch.ones(8, dtype=dtype), 1e-5)
        assert torch.equal(total, residual + x)
        assert torch.equal(normed, plain(total, torch.ones(8, dtype=dtype), 1e-5))


def evaluated(norm):
    """Return a sum of an evaluation, made as Megatron makes it, and its norm."""
    x, residual = (one.detach() for one in draw())
    norm.eval().residual_norm.open()
    with torch.enable_grad():
        total = norm.residual_norm.add(x, residual)
    assert torch.equal(total, x + residual)
    return total, norm.residual_norm._normed


def test_an_evaluation_takes_a_norm_and_records_nothing(norm):
    with torch.no_grad():
        total, computed = evaluated(norm)
        assert norm(total) is computed
        assert torch.equal(norm(total), computed)
    assert not (total.requires_grad or computed.requires_grad)


def test_a_norm_with_a_gradient_is_not_that_of_an_evaluation(norm):
    total, computed = evaluated(norm)
    found = norm(total)
    assert found is not computed and found.requires_grad
    assert torch.equal(found, computed)


def test_modules_with_other_code_get_plain_sums(norm):
    link = norm.residual_norm
    link.open()
    hook = norm.register_forward_pre_hook(lambda *_: None)
    assert link.add(*draw()) is None
    hook.remove()
    norm.forward = lambda x: x
    assert link.add(*draw()) is None
    del norm.forward
    assert link.add(*draw()) is not None


def test_a_module_is_copied_in_the_middle_of_a_pass(norm):
    norm.residual_norm.open()
    norm.residual_norm.add(*draw())
    twin = copy.deepcopy(norm)
    assert twin.residual_norm.path == (twin,)
    assert twin.residual_norm._normed is None
