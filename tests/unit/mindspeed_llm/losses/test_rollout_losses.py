"""Formulas of PPO and GRPO against their definitions, in float64."""

import pytest
import torch

from mindspeed_llm.losses.grpo import (
    divergence,
    group_advantages,
    sequence_means,
    token_weights,
)
from mindspeed_llm.losses.ppo import (
    adapted_kl_coef,
    generalized_advantages,
    policy_loss,
    token_rewards,
    value_loss,
)
from mindspeed_llm.losses.vocab_parallel import entropy

LENGTHS = (4, 1, 3)
MASK = torch.tensor([[float(t < n) for t in range(4)] for n in LENGTHS], dtype=torch.float64)


def test_advantages_are_discounted_sums_of_differences() -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 3, 4, dtype=torch.float64)
    found, returns = generalized_advantages(rewards, values, MASK, gamma=0.9, lam=0.7)
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            expected = 0.0
            for k in range(length - t):
                following = values[row, t + k + 1] if t + k + 1 < length else 0.0
                delta = rewards[row, t + k] + 0.9 * following - values[row, t + k]
                expected += (0.9 * 0.7) ** k * delta
            assert found[row, t].item() == pytest.approx(float(expected))
            assert returns[row, t] == found[row, t] + values[row, t]
        assert not found[row, length:].any() and not returns[row, length:].any()


def test_scores_come_with_the_last_token() -> None:
    ratios, scores = torch.randn(3, 4, dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0])
    rewards = token_rewards(scores, ratios, MASK, 0.5)
    for row, length in enumerate(LENGTHS):
        expected = -0.5 * ratios[row, :length]
        expected[-1] += scores[row]
        assert torch.equal(rewards[row, :length], expected)
        assert not rewards[row, length:].any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.95, 1.05, 1.5])
def test_a_ratio_is_clipped_where_it_would_gain(ratio: float, advantage: float) -> None:
    new = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    loss, is_clipped = policy_loss(new, torch.tensor([advantage]), low=0.2, high=0.3)
    expected = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3))
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    gains = ratio > 1.3 if advantage > 0 else ratio < 0.8
    assert bool(is_clipped) == gains == (new.grad.item() == 0)


def test_values_are_clipped_near_the_old_ones() -> None:
    values, old = torch.tensor([1.0, 1.0, 0.1]), torch.zeros(3)
    losses, is_clipped = value_loss(values, old, torch.tensor([1.0, 3.0, 0.0]), clip=0.2)
    assert losses.tolist() == pytest.approx([0.32, 3.92, 0.005])
    assert is_clipped.tolist() == [True, True, False]


def test_groups_are_normalized_by_themselves() -> None:
    rewards = torch.tensor([0.0, 1.0, 5.0, 5.0])
    assert group_advantages(rewards, 2, scaled=False).tolist() == [-0.5, 0.5, 0.0, 0.0]
    scaled = group_advantages(rewards, 2)
    assert scaled.tolist() == pytest.approx([-0.70701, 0.70701, 0, 0], abs=1e-5)


def test_the_divergence_is_estimated_without_bias() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(2, 50, dtype=torch.float64).log_softmax(-1)
    exact = (ours.exp() * (ours - theirs)).sum()
    each = divergence(ours, theirs)
    assert (each >= 0).all() and (ours.exp() * each).sum().item() == pytest.approx(exact.item())


def test_weights_make_means() -> None:
    lengths = torch.tensor([2, 6])
    kinds = {"grpo": [1 / 2, 1 / 6], "dapo": [1 / 4, 1 / 4], "dr_grpo": [1 / 8, 1 / 8]}
    for kind, expected in kinds.items():
        found = token_weights(lengths, kind, mean_length=4.0, longest=8)
        assert found.tolist() == pytest.approx(expected)


def test_tokens_have_the_mean_of_their_completion() -> None:
    """Rows of one completion each, and a row of several; other tokens have and get nothing."""
    numbers = torch.tensor([[0, 1, 1, 0], [2, 2, 2, 0]])
    values = torch.tensor([[9.0, 1, 2, torch.inf], [3, 4, 8, 9]]).double().requires_grad_()
    found = sequence_means(values, numbers, 3)
    assert found.tolist() == [[0, 1.5, 1.5, 0], [5, 5, 5, 0]]
    (found * torch.tensor([[7.0, 1, 3, 7], [0, 6, 0, 7]])).sum().backward()
    assert values.grad.tolist() == [[0, 2, 2, 0], [2, 2, 2, 0]]
    packed = sequence_means(values.detach().view(1, 8), numbers.view(1, 8), 2)
    assert torch.equal(packed.view(2, 4), found)


def test_the_weight_of_the_divergence_follows_the_target() -> None:
    assert adapted_kl_coef(0.5, 2.0, target=1.0, horizon=10) == pytest.approx(0.5 * 1.02)
    assert adapted_kl_coef(0.5, 0.0, target=1.0, horizon=10) == pytest.approx(0.5 * 0.98)
    assert adapted_kl_coef(0.5, 1.0, target=1.0, horizon=10) == 0.5


def test_entropy_and_its_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5)
    logits[..., -1] = torch.finfo(torch.float32).min  # a row that pads the vocabulary
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    table = theirs.log_softmax(-1)
    expected = -(table.exp() * table)[..., :4].sum(-1)
    found, weights = entropy(ours), torch.randn(2, 3)
    torch.testing.assert_close(found, expected.float())
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad[..., :4], theirs.grad[..., :4].float())
    assert not ours.grad[..., 4].any()
