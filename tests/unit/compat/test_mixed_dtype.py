"""Operands of different floating types meet in the wider one; equal ones are left alone."""

import pytest
import torch

from mindspeed.compat.mixed_dtype import keep_type, promote


def plain(input, weight, bias, scale=1.0):
    return torch.nn.functional.linear(input, weight, bias) * scale


@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_values_and_gradients_equal_the_wider_type(by_keyword, biased):
    torch.manual_seed(0)
    x = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(3, 4).half().requires_grad_()
    bias = torch.randn(3).half().requires_grad_() if biased else None
    call = {"input": x, "weight": weight, "bias": bias}
    output = (
        promote(plain)(**call, scale=2.0) if by_keyword else promote(plain)(*call.values(), 2.0)
    )
    expected = plain(x, weight.float(), None if bias is None else bias.float(), 2.0)
    assert output.dtype == torch.float32 and torch.equal(output, expected)
    output.sum().backward()
    assert weight.grad.dtype == torch.float16
    torch.testing.assert_close(weight.grad, (2 * x.detach().sum(0)).half().expand(3, 4))


def test_equal_types_reach_the_original_unchanged():
    seen = []
    original = lambda input, weight, bias, extra: seen.append((input, weight, bias, extra))  # noqa: E731
    x, weight = torch.ones(2, 2).half(), torch.ones(2, 2).half()
    promote(original)(x, weight, None, extra=7)
    assert all(a is b for a, b in zip(seen[0], (x, weight, None, 7)))


def test_probabilities_keep_the_type_of_the_scores():
    as_bf16 = keep_type(lambda self, input, mask: torch.softmax(input, -1).bfloat16())
    assert as_bf16(None, torch.ones(2, 2), None).dtype == torch.float32
    assert as_bf16(None, torch.ones(2, 2).bfloat16(), mask=None).dtype == torch.bfloat16
