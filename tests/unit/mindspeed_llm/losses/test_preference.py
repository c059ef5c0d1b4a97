"""Losses of preferences: their formulas in float64, and sums over sequences of any rows."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from mindspeed_llm.data.collate import collate_fixed, collate_packed
from mindspeed_llm.losses.log_probs import sequence_log_probs
from mindspeed_llm.losses.preference import (
    Pairs,
    dpo_loss,
    kto_loss,
    report_rewards,
    reward_loss,
    simpo_loss,
)

RATIOS = Pairs(
    torch.tensor([0.7, -0.2, 0.1], dtype=torch.float64),
    torch.tensor([-1.0, 0.4, 0.1], dtype=torch.float64),
)
COUNTS = Pairs(torch.tensor([2.0, 5.0, 4.0]), torch.tensor([4.0, 3.0, 4.0]))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_hand(kind: str, beta: float, smoothing: float) -> list[float]:
    found = []
    kl = [max(0.0, float(values.mean())) for values in RATIOS]
    for chosen, rejected, m, n in zip(*(v.tolist() for v in (*RATIOS, *COUNTS))):
        h = beta * (chosen - rejected)
        found.append(
            {
                "sigmoid": -(1 - smoothing) * math.log(sigmoid(h))
                - smoothing * math.log(sigmoid(-h)),
                "hinge": max(0.0, 1 - h),
                "ipo": (chosen / m - rejected / n - 1 / (2 * beta)) ** 2,
                "kto_pair": 1
                - sigmoid(beta * (chosen - kl[1])) / 2
                - sigmoid(beta * (kl[0] - rejected)) / 2,
            }[kind]
        )
    return found


@pytest.mark.parametrize(
    ("kind", "smoothing"),
    [("sigmoid", 0.0), ("sigmoid", 0.3), ("hinge", 0.0), ("ipo", 0.0), ("kto_pair", 0.0)],
)
def test_dpo_is_its_formula(kind: str, smoothing: float) -> None:
    losses = dpo_loss(RATIOS, COUNTS, beta=0.5, kind=kind, label_smoothing=smoothing)
    assert losses.tolist() == pytest.approx(by_hand(kind, 0.5, smoothing), abs=1e-12)
    inputs = [values.clone().requires_grad_() for values in RATIOS]
    assert gradcheck(lambda *r: dpo_loss(Pairs(*r), COUNTS, beta=0.5, kind=kind), inputs)


def test_the_first_loss_is_ln_2() -> None:
    zeros = Pairs(torch.zeros(3), torch.zeros(3))
    assert torch.equal(dpo_loss(zeros, COUNTS, beta=0.1), torch.full((3,), math.log(2)))
    assert dpo_loss(zeros, COUNTS, beta=0.1, kind="kto_pair").tolist() == [0.5] * 3


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_simpo_is_its_formula(kind: str) -> None:
    losses = simpo_loss(RATIOS, COUNTS, beta=2.0, gamma_beta_ratio=0.3, kind=kind)
    for loss, chosen, rejected, m, n in zip(losses.tolist(), *RATIOS, *COUNTS):
        margin = float(chosen / m - rejected / n) - 0.3
        expected = {
            "sigmoid": -math.log(sigmoid(2 * margin)),
            "hinge": max(0.0, 1 - 2 * margin),
            "ipo": (margin - 0.25) ** 2,
        }
        assert loss == pytest.approx(expected[kind], abs=1e-12)


def test_kto_is_its_formula() -> None:
    ratios, label = RATIOS.chosen, torch.tensor([True, False, True])
    weights = {"desirable_weight": 2.0, "undesirable_weight": 3.0}
    losses = kto_loss(ratios, label, torch.tensor(0.4), beta=0.5, **weights)
    expected = [
        2 * (1 - sigmoid(0.5 * (0.7 - 0.4))),
        3 * (1 - sigmoid(0.5 * (0.4 + 0.2))),
        2 * (1 - sigmoid(0.5 * (0.1 - 0.4))),
    ]
    assert losses.tolist() == pytest.approx(expected, abs=1e-7)


def test_rewards_are_ranked_and_reported() -> None:
    assert reward_loss(RATIOS).tolist() == pytest.approx(
        [-math.log(sigmoid(float(x))) for x in RATIOS.margin], abs=1e-12
    )
    report = {name: (v[0] / v[1]).item() for name, v in report_rewards(RATIOS).items()}
    assert report == pytest.approx(
        {
            "rewards/chosen": 0.2,
            "rewards/rejected": -0.5 / 3,
            "rewards/margins": 1.1 / 3,
            "rewards/accuracies": 1 / 3,  # equal rewards are not higher
        },
        abs=1e-6,
    )


def test_sums_over_sequences_do_not_depend_on_rows() -> None:
    """Padded and concatenated; the losses of tokens that are not trained do not count."""
    lengths = (3, 7, 5, 4)
    samples = [
        {"input_ids": torch.arange(n).numpy(), "labels": torch.arange(n).numpy().copy()}
        for n in lengths
    ]
    for sample in samples:
        sample["labels"][:2] = -100
    padded = collate_fixed(samples, seq_length=9, pad_id=0)
    packed = collate_packed(samples, multiple=8, pad_id=0)
    packed["num_sequences"] = torch.tensor(len(samples))
    torch.manual_seed(0)
    rows = torch.rand(len(lengths), 9)
    row = torch.full((1, packed["tokens"].shape[1]), 77.0)
    for n, start, values in zip(lengths, packed["cu_seqlens"].tolist(), rows):
        row[0, start : start + n] = values[:n]
    (one, counts), (other, others) = (
        sequence_log_probs(rows, padded),
        sequence_log_probs(row.requires_grad_(), packed),
    )
    assert torch.allclose(one, other, atol=1e-6) and torch.equal(counts, others)
    assert counts.tolist() == [n - 2 for n in lengths]
    assert one[0].item() == pytest.approx(-rows[0, 1].item())
    other.sum().backward()
    assert row.grad is not None and torch.equal(row.grad, -packed["loss_mask"])
