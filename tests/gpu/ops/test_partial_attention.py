"""Attention to a part of the keys on a GPU: parts merge to the whole, in float64's vicinity."""

import pytest
import torch

from mindspeed.ops.fusion_attention.flash4 import Documents
from mindspeed.ops.partial_attention import (
    partial_attention,
    partial_attention_backward,
    reference,
)
from mindspeed.parallel.context.blocks import CAUSAL, FULL
from tests.gpu.ops.test_attention_backend import error

pytestmark = pytest.mark.gpu
SCALE = 0.11


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


CASES = {
    # (queries, keys, heads, groups, head size, value size, window)
    "square causal": (2304, 2304, 6, 2, 128, 128, CAUSAL),
    "long full": (2304, 4608, 6, 2, 128, 128, FULL),
    "short full": (200, 333, 6, 3, 64, 64, FULL),
    "more keys, causal": (2304, 4608, 4, 4, 128, 128, CAUSAL),
    "window": (777, 1200, 4, 2, 64, 64, (100, 30)),
    "latent": (640, 640, 4, 4, 192, 128, CAUSAL),
}


@pytest.mark.parametrize("is_repeatable", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name, is_repeatable):
    num_q, num_k, heads, groups, size, value_size, window = CASES[name]
    torch.manual_seed(0)
    q, k, v = (
        draw(2, num_q, heads, size),
        draw(2, num_k, groups, size),
        draw(2, num_k, groups, value_size),
    )
    grad = draw(2, num_q, heads, value_size)
    options = {"scale": SCALE, "window": window}
    torch.use_deterministic_algorithms(is_repeatable)
    out, lse = partial_attention(q, k, v, **options)
    exact, exact_lse = reference.partial_attention(*(x.double() for x in (q, k, v)), **options)
    assert error(out, exact) < 5e-3
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-3)
    # The queries attend to other keys elsewhere: out and lse of all of them.
    elsewhere = exact_lse + 0.7
    whole = torch.randn_like(exact)
    got = partial_attention_backward(grad, q, k, v, whole.bfloat16(), elsewhere.float(), **options)
    again = partial_attention_backward(
        grad, q, k, v, whole.bfloat16(), elsewhere.float(), **options
    )
    torch.use_deterministic_algorithms(False)
    want = reference.partial_attention_backward(
        *(x.double() for x in (grad, q, k, v, whole.bfloat16())), elsewhere, **options
    )
    for ours, exactly, repeated in zip(got[:3], want[:3], again[:3]):
        assert error(ours, exactly) < 1e-2
        assert not is_repeatable or torch.equal(ours, repeated)


@pytest.mark.parametrize("window", [FULL, CAUSAL, (64, 0)])
def test_packed_documents_match_float64(window):
    torch.manual_seed(0)
    q_bounds, k_bounds = [0, 1024, 1031, 2600], [0, 1024, 1040, 2609]
    q, k, v = draw(2600, 6, 128), draw(2609, 2, 128), draw(2609, 2, 128)
    grad, bounds = (
        draw(2600, 6, 128),
        (torch.tensor(b, dtype=torch.int32) for b in (q_bounds, k_bounds)),
    )
    documents = Documents(*(b.cuda() for b in bounds), 1569, 1569)
    options = {"scale": SCALE, "window": window, "documents": documents}
    out, lse = partial_attention(q, k, v, **options)
    exact, exact_lse = reference.partial_attention(*(x.double() for x in (q, k, v)), **options)
    assert error(out, exact) < 5e-3
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-3)
    got = partial_attention_backward(grad, q, k, v, out, lse, **options)
    want = reference.partial_attention_backward(
        *(x.double() for x in (grad, q, k, v)), exact, exact_lse, **options
    )
    for ours, exactly in zip(got[:3], want[:3]):
        assert error(ours, exactly) < 1e-2


def test_float32_and_bias_take_the_reference():
    q, k, v = (draw(1, 30, heads, 24, dtype=torch.float32) for heads in (4, 2, 2))
    bias = draw(1, 4, 30, 30, dtype=torch.float32)
    got = partial_attention(q, k, v, scale=SCALE, bias=bias)
    want = reference.partial_attention(q, k, v, scale=SCALE, bias=bias)
    for ours, exactly in zip(got, want):
        torch.testing.assert_close(ours, exactly)
