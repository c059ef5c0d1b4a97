"""Filters and draws against float64 arithmetic and transformers' own filters."""

import numpy as np
import pytest
import torch

from mindspeed_llm.generation.sampling import Chooser, Rule, filtered

RULES = [
    Rule(True, temperature=0.7),
    Rule(True, temperature=1.3, top_k=5),
    Rule(True, top_p=0.6),
    Rule(True, temperature=0.5, top_k=12, top_p=0.9),
    Rule(True, top_k=1000, top_p=1.0),
    Rule(True, temperature=2.0, top_k=1, top_p=0.1),
]


def logits(rows=4, count=40):
    return torch.randn(rows, count, generator=torch.Generator().manual_seed(3)) * 3


def reference(values, rule):
    """Return the probabilities of one row: filter one after the other, in float64."""
    values = np.asarray(values, dtype=np.float64) / rule.temperature
    order = sorted(range(len(values)), key=lambda place: -values[place])
    order = order[: rule.top_k or len(order)]
    shares = np.exp(values[order] - values[order[0]])
    shares /= shares.sum()
    kept, total = [], 0.0
    for place, share in zip(order, shares):
        if total < rule.top_p:
            kept.append((place, share))
            total += share
    result = np.zeros(len(values))
    for place, share in kept:
        result[place] = share / total
    return result


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_probabilities(rule):
    found = filtered(logits(), rule).softmax(-1)
    for row, values in zip(found, logits()):
        assert np.abs(row.numpy() - reference(values.numpy(), rule)).max() < 1e-6


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_filters_of_transformers(rule):
    from transformers.generation import logits_process as theirs

    scores = theirs.TemperatureLogitsWarper(rule.temperature)(None, logits())
    if rule.top_k:
        scores = theirs.TopKLogitsWarper(rule.top_k)(None, scores)
    scores = theirs.TopPLogitsWarper(rule.top_p)(None, scores)
    assert torch.equal(filtered(logits(), rule), scores)


def test_draws_follow_the_probabilities():
    rule = Rule(True, temperature=0.8, top_k=8, top_p=0.95, seed=5)
    row, count = logits(1), 20_000
    chooser = Chooser(rule, 0, 1)
    drawn = torch.cat([chooser.choose(row, [0]) for _ in range(count)])
    expected = reference(row[0].numpy(), rule)
    found = np.bincount(drawn.numpy(), minlength=len(expected))
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(expected))
    spread = np.sqrt(count * expected * (1 - expected))
    assert (np.abs(found - count * expected) <= 4.5 * spread).all()


def test_a_row_does_not_depend_on_its_batch():
    rule = Rule(True, seed=11)
    whole = [Chooser(rule, 0, 4).choose(logits(), [0, 1, 2, 3]) for _ in range(2)]
    assert torch.equal(*whole)
    alone = Chooser(rule, 2, 1)
    part = Chooser(rule, 1, 3)
    assert alone.choose(logits()[2:3], [0]) == whole[0][2] == part.choose(logits()[2:3], [1])
    other = Chooser(Rule(True, seed=12), 0, 64).choose(logits(64), list(range(64)))
    assert not torch.equal(other, Chooser(rule, 0, 64).choose(logits(64), list(range(64))))


def test_temperature_zero_takes_the_best():
    chosen = Chooser(Rule(True, temperature=0), 0, 4).choose(logits(), [0, 1, 2, 3])
    assert torch.equal(chosen, logits().argmax(-1))
