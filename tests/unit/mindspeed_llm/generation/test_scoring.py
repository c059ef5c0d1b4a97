"""Scores of given tokens, by the logits after each input."""

import torch
from torch.nn.functional import cross_entropy

from mindspeed_llm.generation.scoring import ScoreRequest, rows_by_input, score_rows


def test_rows_are_scored_at_their_ends():
    request = ScoreRequest(inputs=((5, 3, 1), (2,)), scored=(((1, 4),), ((0,),)))
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
        request = ScoreRequest(((0, 1),), (((1, last),),))
        assert score_rows(logits, request)[0, 1] == is_greedy


def test_answers_that_differ_in_their_last_token_share_an_input():
    question, other = (5, 3, 1), (5, 3)
    answers = [(4,), (6,), (1, 2), (2,)]
    sequences = [(*question, *answer) for answer in answers[:2]]
    sequences += [(*other, *answers[2]), (*question, *answers[3])]
    rows = rows_by_input(enumerate(sequences))
    assert rows == {(5, 3, 1): [0, 1, 2, 3]}
    request = ScoreRequest(tuple(rows), (tuple(answers),))
    logits = torch.randn(1, 3, 7, generator=torch.Generator().manual_seed(0))
    log_probs = logits[0].log_softmax(-1)
    expected = [log_probs[2, 4], log_probs[2, 6], log_probs[1, 1] + log_probs[2, 2]]
    found = score_rows(logits, request)
    torch.testing.assert_close(found[:, 0], torch.stack([*expected, log_probs[2, 2]]))
    assert len(found) == request.num_scored == 4
