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


def loaded_logits(folder, refused):
    """Return the logits of a model that is loaded as every command loads it; and errors before."""
    from mindspeed.config import ConfigError
    from mindspeed_llm.generation.model import load_model
    from mindspeed_llm.training.options import TrainOptions

    errors = []
    for options in refused:
        with pytest.raises(ConfigError) as error:
            load_model(TrainOptions(load=folder, **options))
        errors.append(str(error.value))
    (model,) = load_model(TrainOptions(load=folder)).chunks
    positions = torch.arange(tiny.TOKENS.shape[1]).expand_as(tiny.TOKENS)
    with torch.no_grad():
        return errors, model(tiny.TOKENS, positions, None)


@pytest.mark.parametrize("name", RULES)
def test_logits_are_those_of_transformers(name, tmp_path, monkeypatch):
    kind, values = tiny.MODELS[name]
    monkeypatch.setitem(tiny.MODELS, name, (kind, values | RULES[name]))
    folder = str(tiny.save(name, tmp_path))
    expected = tiny.logits(folder)
    rule, other = {"deepseek2_lite": ("max", "top2"), "deepseek3": ("top2", "max")}[name]
    refused = [{"moe_router_group_score": other}, {"moe_router_fusion": True}]
    ((errors, found),) = run_ranks(loaded_logits, 1, folder, refused)
    assert f"--moe-router-group-score {other}: this" in errors[0] and f"has {rule}," in errors[0]
    assert "--moe-router-fusion: this" in errors[1] and f"experts by {rule}," in errors[1]
    assert (found - expected).abs().max() < 1e-5
    (other,) = run_ranks(megatron_logits, 1, folder, folder)
    assert (other - expected).abs().max() > 1e-2, "Megatron's rule is the same here"
