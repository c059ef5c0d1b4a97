"""Scores of given tokens, by the logits after each input."""

import torch
from torch.nn.functional import cross_entropy

from mindspeed_llm.generation.scoring import ScoreRequest, score_rows


def test_rows_are_scored_at_their_ends():
    sequences = ((5, 3, 1, 4), (2, 0))
    request = ScoreRequest(sequences, num_scored=(2, 1))
    assert request.inputs == [(5, 3, 1), (2,)]
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    logits[1, 2, 0] = 9.0  # the best token is the scored one
    found = score_rows(logits, request)
    first = -cross_entropy(logits[0, 1:], torch.tensor([1, 4]), reduction="sum")
    second = -cross_entropy(logits[1, 2:], torch.tensor([0]), reduction="sum")
    torch.testing.assert_close(found[:, 0], torch.stack([first, second]))
    assert found[:, 1].tolist() == [0.0, 1.0]


def test_an_answer_is_greedy_only_as_a_whole():
    logits = torch.zeros(1, 2, 3)
    logits[0, 0, 1], logits[0, 1, 2] = 1.0, 1.0
    for last, is_greedy in ((2, 1.0), (0, 0.0)):
        request = ScoreRequest(((0, 1, last),), num_scored=(2,))
        assert score_rows(logits, request)[0, 1] == is_greedy
