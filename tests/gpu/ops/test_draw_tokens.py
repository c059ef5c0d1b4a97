"""Tokens drawn on a GPU: every point falls into the share of its token, in float64's vicinity."""

import pytest
import torch

from mindspeed.ops.draw_tokens import draw_tokens, reference
from tests.unit.ops.test_draw_tokens import NEAR_ONE, assert_drawn

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [5, 49152, 151936, 151665])
def test_points_fall_into_the_share_of_their_token(vocabulary, dtype, temperature):
    torch.manual_seed(0)
    rows = 256
    logits = torch.randn(rows, vocabulary + 3, device="cuda").mul(3).to(dtype)[:, :vocabulary]
    points = torch.rand(rows, 1, device="cuda")
    points[0], points[1] = 0.0, NEAR_ONE
    drawn = draw_tokens(logits, points, temperature)
    assert_drawn(logits, points, temperature, drawn, slack=3e-6)  # running sums of 1,187 spans
    tokens, log_probs = reference.draw_tokens(logits, points, temperature)
    is_same = tokens == drawn[0]
    assert is_same.float().mean() > 0.95, "rounding moves a point to a neighbour now and then"
    torch.testing.assert_close(log_probs[is_same], drawn[1][is_same], rtol=1e-5, atol=1e-5)


def test_filtered_tokens_are_never_drawn():
    torch.manual_seed(0)
    logits = torch.full((512, 49152), -torch.inf, device="cuda")
    kept = torch.randint(0, 49152, (512, 20), device="cuda")
    logits.scatter_(1, kept, torch.randn(512, 20, device="cuda"))
    points = torch.rand(512, 1, device="cuda")
    points[:256] = NEAR_ONE
    assert_drawn(logits, points, 1.0, draw_tokens(logits, points), slack=3e-6)


def test_rows_of_nan_draw_a_token_of_the_vocabulary():
    logits = torch.randn(3, 151936, device="cuda")
    logits[1:] = torch.nan
    tokens, log_probs = draw_tokens(logits, torch.rand(3, 1, device="cuda"))
    assert ((tokens >= 0) & (tokens < 151936)).all()
    assert log_probs.isnan().tolist() == [False, True, True]
