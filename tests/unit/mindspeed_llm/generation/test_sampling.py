"""Sampling against float64 arithmetic and transformers, beam search against all completions."""

from itertools import product

import numpy as np
import pytest
import torch

from mindspeed_llm.generation.sampling import (
    BeamParams,
    BeamSearch,
    Sampler,
    SamplingParams,
    filter_logits,
    pick_tokens,
)

PARAMS = [
    SamplingParams(True, temperature=0.7),
    SamplingParams(True, temperature=1.3, top_k=5),
    SamplingParams(True, top_p=0.6),
    SamplingParams(True, temperature=0.5, top_k=12, top_p=0.9),
    SamplingParams(True, top_k=1000, top_p=1.0),
    SamplingParams(True, temperature=2.0, top_k=1, top_p=0.1),
]
VOCABULARY, LENGTH, STOP = 5, 4, 0


def logits(rows=4, count=40):
    return torch.randn(rows, count, generator=torch.Generator().manual_seed(3)) * 3


def reference(values, params):
    """Return the probabilities of one row: filter one after the other, in float64."""
    values = np.asarray(values, dtype=np.float64) / params.temperature
    order = sorted(range(len(values)), key=lambda index: -values[index])
    order = order[: params.top_k or len(order)]
    probs = np.exp(values[order] - values[order[0]])
    probs /= probs.sum()
    kept, total = [], 0.0
    for index, prob in zip(order, probs):
        if total < params.top_p:
            kept.append((index, prob))
            total += prob
    result = np.zeros(len(values))
    for index, prob in kept:
        result[index] = prob / total
    return result


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_probabilities(params):
    found = filter_logits(logits(), params).softmax(-1)
    for row, values in zip(found, logits()):
        assert np.abs(row.numpy() - reference(values.numpy(), params)).max() < 1e-6


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_filters_of_transformers(params):
    from transformers.generation import logits_process as theirs

    scores = theirs.TemperatureLogitsWarper(params.temperature)(None, logits())
    if params.top_k:
        scores = theirs.TopKLogitsWarper(params.top_k)(None, scores)
    scores = theirs.TopPLogitsWarper(params.top_p)(None, scores)
    assert torch.equal(filter_logits(logits(), params), scores)


def test_draws_follow_the_probabilities():
    params = SamplingParams(True, temperature=0.8, top_k=8, top_p=0.95, seed=5)
    row, count = logits(1), 20_000
    sampler = Sampler(params, 0, 1)
    drawn = torch.cat([sampler.sample(row, [0])[0] for _ in range(count)])
    expected = reference(row[0].numpy(), params)
    found = np.bincount(drawn.numpy(), minlength=len(expected))
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(expected))
    spread = np.sqrt(count * expected * (1 - expected))
    assert (np.abs(found - count * expected) <= 4.5 * spread).all()


def test_numbers_fall_into_the_share_of_their_token():
    rows = logits(8, 300).repeat(50, 1)
    drawn = torch.rand(len(rows), 1, generator=torch.Generator().manual_seed(7))
    drawn[:8], drawn[8:16] = 0.0, 1 - 2**-24
    params = SamplingParams(True, top_k=30)
    tokens, _ = pick_tokens(rows, drawn, params)
    shares = filter_logits(rows, params).double().softmax(-1)
    ends = shares.cumsum(-1).gather(1, tokens[:, None])
    width = shares.gather(1, tokens[:, None])
    assert (width > 0).all()
    assert ((ends - width - 1e-6 <= drawn) & (drawn <= ends + 1e-6)).all()


def sample(sampler, values, rows):
    return sampler.sample(values, rows)[0]


def test_a_row_does_not_depend_on_its_batch():
    params = SamplingParams(True, seed=11)
    whole = [sample(Sampler(params, 0, 4), logits(), [0, 1, 2, 3]) for _ in range(2)]
    assert torch.equal(*whole)
    alone = sample(Sampler(params, 2, 1), logits()[2:3], [0])
    assert alone == whole[0][2] == sample(Sampler(params, 1, 3), logits()[2:3], [1])
    rows = list(range(64))
    other = sample(Sampler(SamplingParams(True, seed=12), 0, 64), logits(64), rows)
    assert not torch.equal(other, sample(Sampler(params, 0, 64), logits(64), rows))


@pytest.mark.parametrize("params", [SamplingParams(), *PARAMS], ids=str)
def test_log_probabilities_are_those_of_the_whole_softmax(params):
    tokens, found = Sampler(params, 0, 4).sample(logits(), [0, 1, 2, 3], log_probs=True)
    every = (logits().double() / params.temperature).log_softmax(-1)
    want = every.gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=1e-6)


def test_temperature_zero_takes_the_best():
    chosen = sample(Sampler(SamplingParams(True, temperature=0), 0, 4), logits(), [0, 1, 2, 3])
    assert torch.equal(chosen, logits().argmax(-1))


def chain(seed):
    """Return logits by position and previous token; the last row is for the first token."""
    return (
        torch.randn(
            LENGTH, VOCABULARY + 1, VOCABULARY, generator=torch.Generator().manual_seed(seed)
        )
        * 2
    )


def logits_after(table, hypotheses):
    rows = [table[len(h)][h[-1] if h else VOCABULARY] for h in hypotheses]
    return torch.stack(rows)


def search(table, beams, params=SamplingParams()):  # noqa: B008
    """Search as the engine does; return the best hypothesis and the number of steps."""
    state, passes = BeamSearch(beams, params, {STOP}, LENGTH), 0
    while not state.is_done:
        before = [h.tokens for h in state.running]
        rows = state.advance(state.propose(logits_after(table, before)))
        passes += 1
        for row, hypothesis in zip(rows, state.running, strict=True):
            assert hypothesis.tokens[:-1] == before[row], "a row goes on with its own cache"
    return state.best, passes


def all_completions(table, penalty):
    """Yield every completion with its score."""
    log_probs = table.double().log_softmax(-1)
    for tokens in product(range(VOCABULARY), repeat=LENGTH):
        end = tokens.index(STOP) + 1 if STOP in tokens else LENGTH
        answer, last, total = tokens[:end], VOCABULARY, 0.0
        for position, token in enumerate(answer):
            total += log_probs[position, last, token].item()
            last = token
        yield answer, total / len(answer) ** penalty


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(4))
def test_enough_beams_find_the_best_completion(seed, penalty):
    table = chain(seed)
    found, _ = search(table, BeamParams(VOCABULARY**LENGTH, length_penalty=penalty))
    answer, score = max(all_completions(table, penalty), key=lambda pair: pair[1])
    assert found.tokens == answer
    assert found.score == pytest.approx(score, rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_one_beam_is_greedy(seed):
    table = chain(seed)
    table[..., STOP] = -30.0  # no completion ends before its limit
    tokens = []
    for position in range(LENGTH):
        tokens.append(int(table[position, tokens[-1] if tokens else VOCABULARY].argmax()))
    found, passes = search(table, BeamParams(1))
    assert found.tokens == tuple(tokens) and passes == LENGTH


def test_more_beams_are_never_worse():
    for seed in range(6):
        table = chain(seed)
        scores = [
            search(table, BeamParams(count, length_penalty=0.0))[0].score for count in (1, 3, 200)
        ]
        assert scores[0] <= scores[1] + 1e-5 and scores[1] <= scores[2] + 1e-5


def test_sampled_beams_depend_on_the_seed_only():
    table = chain(9) / 4
    table[..., STOP] = -30.0
    found = [
        search(table, BeamParams(2), SamplingParams(True, seed=seed))[0] for seed in (*range(8), 0)
    ]
    assert found[0] == found[-1] and len({one.tokens for one in found}) > 1
