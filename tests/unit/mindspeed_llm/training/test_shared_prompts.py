"""When prompts are shared, and that the user's tokens are counted all the same."""

from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.models.config import MLAConfig, ModelConfig
from mindspeed_llm.tasks.posttrain.rows import Rows
from mindspeed_llm.training.options import TrainOptions, check
from mindspeed_llm.training.shared_prompts import shares_prompts, why_not_shared
from tests.unit.mindspeed_llm.data.test_shared_prompts import pair_of
from tests.unit.mindspeed_llm.training.shapes import DENSE, ROUTED

LATENT = MLAConfig(
    q_lora_rank=None, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8
)
GIVEN: dict[str, Any] = {"load": "m", "data_path": ("d",), "train_iters": 1, "lr": 1e-5}


def options(**changes: Any) -> TrainOptions:
    return TrainOptions(**GIVEN | {"stage": "dpo"} | changes)


def shape(**changes: Any) -> ModelConfig:
    return DENSE.model_copy(update=changes)


@pytest.mark.parametrize("stage", ["dpo", "simpo", "orm"])
def test_stages_on_pairs_share_unless_switched_off(stage: str) -> None:
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "lora_r": 4}
    for changes in ({}, layout, {"pipeline_model_parallel_size": 2, "variable_seq_lengths": True}):
        assert shares_prompts(options(stage=stage, **changes), DENSE)
    assert shares_prompts(options(stage=stage), shape(sliding_window=4, qk_layernorm=True))
    assert not shares_prompts(options(stage=stage, no_share_prompts=True), DENSE)
    check(options(stage=stage, no_share_prompts=True))


@pytest.mark.parametrize("stage", ["sft", "kto", "prm"])
def test_other_stages_have_nothing_to_share(stage: str) -> None:
    assert not shares_prompts(options(stage=stage), DENSE)
    with pytest.raises(ConfigError, match="no-share-prompts: is for --stage dpo and simpo and orm"):
        check(options(stage=stage, no_share_prompts=True))


@pytest.mark.parametrize(
    ("changes", "sizes", "reason"),
    [
        ({"context_parallel_size": 2}, {}, "--context-parallel-size"),
        ({"transformer_impl": "local"}, {}, "--transformer-impl local"),
        ({"schedules_method": "zb-h1"}, {}, "--schedules-method"),
        ({"attention_dropout": 0.1}, {}, "dropout"),
        ({"hidden_dropout": 0.1}, {}, "dropout"),
        ({"lora_r": 4, "lora_dropout": 0.1}, {}, "dropout"),
        ({}, {"moe": ROUTED}, "a mixture of experts"),
        ({}, {"mla": LATENT}, "latent attention"),
        ({}, {"attention_sinks": True}, "attention with sinks"),
        ({}, {"mtp_num_layers": 1}, "multi-token prediction"),
    ],
)
def test_what_needs_whole_sequences_is_named(
    changes: dict[str, Any], sizes: dict[str, Any], reason: str
) -> None:
    assert why_not_shared(options(**changes), shape(**sizes)) == reason
    assert not shares_prompts(options(**changes), shape(**sizes))


def test_another_engine_has_its_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PathFinder, "find_spec", lambda name: ModuleSpec(name, None))
    assert why_not_shared(options(), DENSE) == "NVIDIA's transformer_engine"


def test_tokens_are_those_of_both_sequences() -> None:
    prompt, answers = [(3, False)] * 5, ([(1, True)] * 2, [(2, True)] * 4)
    pairs = [pair_of(*(prompt + answer for answer in answers))] * 2
    rows = Rows(12, 4, 0, "fixed")
    shared, whole = (rows.collate_pairs(pairs, is_shared=each) for each in (True, False))
    for batch, computed in ((shared, 24), (whole, 4 * 12)):
        assert (batch["real_tokens"], batch["num_sequences"]) == (2 * (7 + 9), 4)
        assert batch["tokens"].numel() == computed
    assert shared["loss_mask"].sum() == whole["loss_mask"].sum() == 12
