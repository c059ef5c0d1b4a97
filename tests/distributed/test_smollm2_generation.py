"""A real model: greedy tokens of SmolLM2-135M are those of transformers at every layout."""

import pytest
import torch

from tests.llm.generation import ours, request, theirs
from tests.ranks import run_ranks

MAX_NEW_TOKENS = 16
PROMPTS = (
    (1, 4093, 198, 10576, 4150, 260, 1238, 24630, 28, 284, 281, 527, 713, 436, 357, 808, 4940)
    + (47, 2, 198, 1, 520, 9531, 198),
    (1, 4093, 198, 36971, 281, 827, 8545, 1701, 260, 6376, 314, 4461, 981, 260, 1194, 284, 2382)
    + (418, 33937, 30, 2, 198, 1, 520, 9531, 198),
    (504, 3575, 282, 4649, 314),
    (10720, 24916, 418),
    (29861,),
)


@pytest.fixture(scope="module")
def model(smollm2):
    """Return the model's folder and what transformers answers."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    answers = theirs(reference.eval(), PROMPTS, MAX_NEW_TOKENS, stops=(2,))
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    return str(smollm2), answers


@pytest.mark.parametrize("tp, pp", [(1, 1), (3, 1), (1, 2)], ids=str)
def test_greedy(model, tp, pp):
    folder, expected = model
    asked = [request(PROMPTS, MAX_NEW_TOKENS, stops=(2,))]
    found = run_ranks(ours, tp * pp, folder, asked, True, tp, pp, timeout=280)
    assert found[0] == [expected]
