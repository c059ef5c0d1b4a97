"""Tokens at given points of a softmax, and their log-probabilities, against float64."""

import pytest
import torch

from mindspeed.ops.draw_tokens import draw_tokens, triton_impl
from mindspeed.ops.draw_tokens.reference import SPAN, tokens_at

IMPLS = pytest.mark.parametrize("draw", [draw_tokens, triton_impl.draw_tokens])
NEAR_ONE = 1 - 2**-24


def random_logits(rows, count, dtype=torch.float32):
    values = torch.randn(rows, count + 3, generator=torch.Generator().manual_seed(3)) * 3
    return values.to(dtype)[:, :count]  # rows of a padded vocabulary


def assert_drawn(logits, points, temperature, drawn, slack=1e-6):
    """Check that every point falls into the share of its token, to the rounding of float32."""
    tokens, log_probs = drawn
    shares = (logits.double() / temperature).softmax(-1)
    width = shares.gather(1, tokens[:, None])
    ends = shares.cumsum(-1).gather(1, tokens[:, None])
    assert (width > 0).all()
    assert ((ends - width - slack <= points) & (points <= ends + slack)).all()
    torch.testing.assert_close(log_probs.double(), width.log().squeeze(1), rtol=1e-6, atol=2e-6)


@IMPLS
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("count", [5, 300, 2 * SPAN * triton_impl.SPANS + 129])
def test_points_fall_into_the_share_of_their_token(draw, count, temperature):
    logits = random_logits(12, count)
    points = torch.rand(12, 1, generator=torch.Generator().manual_seed(7))
    points[0], points[1] = 0.0, NEAR_ONE
    assert_drawn(logits, points, temperature, draw(logits, points, temperature))


@IMPLS
def test_tokens_of_minus_infinity_are_never_drawn(draw):
    """Nor are those behind the last one that is left, whatever rounding does to the sums."""
    count = 2 * SPAN * triton_impl.SPANS
    logits = torch.full((6, count), -torch.inf)
    logits[:, SPAN + 3 : SPAN + 9] = random_logits(6, 6)
    logits[:, SPAN * triton_impl.SPANS + 7] = 1.0
    points = torch.tensor([0.0, 0.2, 0.5, 0.9, NEAR_ONE, 1.0])[:, None]
    assert_drawn(logits, points.clamp(max=NEAR_ONE), 1.0, draw(logits, points))


@IMPLS
def test_logits_of_less_precision_are_not_rounded_again(draw):
    logits = random_logits(4, 700, torch.bfloat16)
    points = torch.tensor([0.1, 0.4, 0.6, 0.9])[:, None]
    drawn = draw(logits, points, 0.7)
    assert drawn[1].dtype == torch.float32
    assert_drawn(logits, points, 0.7, drawn)


def test_float64_is_drawn_in_float64():
    logits, points = random_logits(4, 300).double(), torch.rand(4, 1).double()
    tokens, log_probs = draw_tokens(logits, points, 0.9)
    want = (logits / 0.9).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(log_probs, want, rtol=1e-14, atol=1e-14)


def test_a_span_without_tokens_is_never_chosen():
    """Running sums of a GPU may grow by rounding where nothing is added."""
    spans = torch.zeros(4, 3, SPAN)
    spans[:, 0, 3], spans[:, 1, 5] = 0.5, 0.49999994
    totals = torch.tensor([0.5, 0.99999994, 1.0]).repeat(4, 1)
    points = torch.tensor([[0.0], [0.7], [NEAR_ONE], [1.0]])
    assert tokens_at(points, spans, totals).tolist() == [3, *[SPAN + 5] * 3]


def test_arguments_that_do_not_match_are_named():
    with pytest.raises(ValueError, match=r"use \(rows, vocabulary\) and \(rows, 1\)"):
        draw_tokens(torch.zeros(3, 5), torch.zeros(3))
    with pytest.raises(ValueError, match="temperature=0: use a positive one"):
        draw_tokens(torch.zeros(3, 5), torch.zeros(3, 1), 0)
