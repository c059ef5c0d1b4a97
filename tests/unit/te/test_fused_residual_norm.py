"""What passes from a residual sum to the norm behind it, and when nothing does."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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


def test_without_gradients_sums_are_made_alone(norm):
    (x, residual), link = draw(), norm.residual_norm
    link.open()
    with torch.no_grad():
        assert link.add(x, residual) is None
    assert link.add(x.detach(), residual) is None


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
