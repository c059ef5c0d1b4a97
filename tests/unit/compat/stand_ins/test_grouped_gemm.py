"""Grouped GEMMs against the loop they stand for, and Megatron's GroupedMLP finds them."""

import pytest
import torch

from mindspeed.compat.stand_ins.grouped_gemm import ops

SIZES = [3, 0, 5, 1]


@pytest.mark.parametrize("trans_b", [False, True])
def test_each_group_is_multiplied_by_its_own_matrix(trans_b):
    torch.manual_seed(0)
    a = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, *((6, 4) if trans_b else (4, 6)), dtype=torch.float64, requires_grad=True)
    group_of_row = torch.repeat_interleave(torch.arange(4), torch.tensor(SIZES))
    full = b.transpose(1, 2) if trans_b else b
    expected = torch.einsum("tk,tkn->tn", a, full[group_of_row])
    product = ops.gmm(a, b, torch.tensor(SIZES), trans_b=trans_b)
    torch.testing.assert_close(product, expected)
    weight = torch.randn_like(expected)
    for got, wanted in zip(
        torch.autograd.grad((product * weight).sum(), (a, b)),
        torch.autograd.grad((expected * weight).sum(), (a, b)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_no_rows_at_all_still_gives_every_matrix_a_gradient():
    a, b = torch.randn(0, 4), torch.randn(2, 4, 6, requires_grad=True)
    product = ops.gmm(a, b, torch.tensor([0, 0]))
    assert product.shape == (0, 6)
    product.sum().backward()
    assert torch.equal(b.grad, torch.zeros_like(b))


def test_rows_outside_the_groups_are_an_error():
    with pytest.raises(ValueError, match=r"5 rows and 2 matrices for groups of \[1, 3\]"):
        ops.gmm(torch.randn(5, 4), torch.randn(2, 4, 6), torch.tensor([1, 3]))
