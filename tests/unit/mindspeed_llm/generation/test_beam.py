"""Beam search on a small chain of words, against going through all answers."""

from itertools import product

import pytest
import torch

from mindspeed_llm.generation.beam import Beams, BeamSearch
from mindspeed_llm.generation.sampling import Rule

WORDS, ROOM, STOP = 5, 4, 0


def chain(seed):
    """The logits of the next word after each word, at each place; those of the first come last."""
    return torch.randn(ROOM, WORDS + 1, WORDS, generator=torch.Generator().manual_seed(seed)) * 2


def logits_after(table, hypotheses):
    rows = [table[len(h)][h[-1] if h else WORDS] for h in hypotheses]
    return torch.stack(rows)


def search(table, beams, rule=Rule()):  # noqa: B008
    """Search as the engine does; return the answer and how many passes it took."""
    state, passes = BeamSearch(beams, rule, {STOP}, ROOM), 0
    while not state.is_done:
        before = [h.tokens for h in state.running]
        rows = state.advance(state.propose(logits_after(table, before)))
        passes += 1
        for row, hypothesis in zip(rows, state.running, strict=True):
            assert hypothesis.tokens[:-1] == before[row], "a row goes on with its own cache"
    return state.best, passes


def all_answers(table, penalty):
    """Yield every whole answer with its score."""
    shares = table.double().log_softmax(-1)
    for words in product(range(WORDS), repeat=ROOM):
        end = words.index(STOP) + 1 if STOP in words else ROOM
        answer, last, total = words[:end], WORDS, 0.0
        for place, word in enumerate(answer):
            total += shares[place, last, word].item()
            last = word
        yield answer, total / len(answer) ** penalty


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(4))
def test_enough_beams_find_the_best_answer(seed, penalty):
    table = chain(seed)
    found, _ = search(table, Beams(WORDS**ROOM, length_penalty=penalty))
    answer, score = max(all_answers(table, penalty), key=lambda pair: pair[1])
    assert found.tokens == answer
    assert found.score == pytest.approx(score, rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_one_beam_takes_the_best_word_each_time(seed):
    table = chain(seed)
    table[..., STOP] = -30.0  # no answer ends before its room is full
    words = []
    for place in range(ROOM):
        words.append(int(table[place, words[-1] if words else WORDS].argmax()))
    found, passes = search(table, Beams(1))
    assert found.tokens == tuple(words) and passes == ROOM


def test_more_beams_are_never_worse():
    for seed in range(6):
        table = chain(seed)
        scores = [search(table, Beams(count, length_penalty=0.0))[0].score for count in (1, 3, 200)]
        assert scores[0] <= scores[1] + 1e-5 and scores[1] <= scores[2] + 1e-5


def test_sampled_beams_depend_on_the_seed_only():
    table = chain(9) / 4
    table[..., STOP] = -30.0
    found = [search(table, Beams(2), Rule(True, seed=seed))[0] for seed in (*range(8), 0)]
    assert found[0] == found[-1] and len({one.tokens for one in found}) > 1
