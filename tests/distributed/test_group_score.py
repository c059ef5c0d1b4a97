"""Models whose groups of experts are chosen by another rule than Megatron's have HF's logits."""

import pytest
import torch

from tests.llm import tiny
from tests.llm.megatron_logits import megatron_logits
from tests.ranks import run_ranks

RULES = {
    # As the published DeepSeek-V2 (6 experts of 3 groups): Megatron would count two scores.
    "deepseek2_lite": {"num_experts_per_tok": 4},
    # Megatron would count one score.
    "deepseek3": {"num_experts_per_tok": 2},
}


def loaded_logits(folder):
    """Return the logits of a model that is loaded as every command loads it."""
    from mindspeed_llm.generation.model import load_model
    from mindspeed_llm.training.options import TrainOptions

    (model,) = load_model(TrainOptions(load=folder)).chunks
    positions = torch.arange(tiny.TOKENS.shape[1]).expand_as(tiny.TOKENS)
    with torch.no_grad():
        return model(tiny.TOKENS, positions, None)


@pytest.mark.parametrize("name", RULES)
def test_logits_are_those_of_transformers(name, tmp_path, monkeypatch):
    kind, values = tiny.MODELS[name]
    monkeypatch.setitem(tiny.MODELS, name, (kind, values | RULES[name]))
    folder = str(tiny.save(name, tmp_path))
    expected = tiny.logits(folder)
    (found,) = run_ranks(loaded_logits, 1, folder)
    assert (found - expected).abs().max() < 1e-5
    (other,) = run_ranks(megatron_logits, 1, folder, folder)
    assert (other - expected).abs().max() > 1e-2, "Megatron's rule is the same here"
