"""Flags that describe a model are those of its config.json, or an error that names them."""

from typing import Any

import pytest

from mindspeed.config import ConfigError, build
from mindspeed_llm.models.config import MLAConfig, ModelConfig, MoEConfig, RotaryConfig
from mindspeed_llm.training.architecture_options import check_architecture, parse_pattern
from mindspeed_llm.training.model_shape import find_shape
from mindspeed_llm.training.options import TrainOptions
from tests.unit.mindspeed_llm.training.shapes import DENSE

# As a small DeepSeek-V3.
LATENT = DENSE.model_copy(
    update={
        "moe": MoEConfig(
            num_experts=8,
            topk=2,
            ffn_hidden_size=16,
            is_moe_layer=(False, True, True, True),
            shared_ffn_hidden_size=24,
            score_function="sigmoid",
            topk_scaling_factor=2.5,
            num_groups=4,
            group_topk=3,
            expert_bias=True,
        ),
        "mla": MLAConfig(
            q_lora_rank=20, kv_lora_rank=12, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6
        ),
        "rotary": RotaryConfig(
            base=5e4,
            scaling="yarn",
            factor=40.0,
            original_length=32,
            beta_fast=30.0,
            beta_slow=2.0,
            mscale=0.9,
            mscale_all_dim=0.8,
        ),
        "mtp_num_layers": 1,
    }
)
SIZES = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rotary_base": 5e4,
    "rope_scaling_factor": 40.0,
    "rope_scaling_original_max_position_embeddings": 32,
    "rope_scaling_beta_fast": 30.0,
    "rope_scaling_beta_slow": 2.0,
    "rope_scaling_mscale": 0.9,
    "rope_scaling_mscale_all_dim": 0.8,
    "mtp_num_layers": 1,
    "first_k_dense_replace": 1,
}
KINDS = {
    "multi_head_latent_attention": True,
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
    "moe_router_score_function": "sigmoid",
    "rope_scaling_type": "yarn",
    "moe_layer_freq": "([0]*1+[1]*3)",
    "rotary_percent": 1.0,
}


def check(model: ModelConfig = DENSE, **given: Any) -> None:
    check_architecture(build(TrainOptions, given | {"load": "m"}, source="a test"), model)


def test_sizes_must_be_those_of_the_model() -> None:
    same = {"num_layers": 4, "hidden_size": 32, "num_query_groups": 2, "vocab_size": 99}
    check(norm_epsilon=1e-6, disable_bias_linear=True, **same)
    wrong = {"num_layers": 5, "norm_epsilon": 1e-5, "rotary_base": 5e5, "add_qkv_bias": True}
    with pytest.raises(ConfigError) as caught:
        check(**same | wrong)
    assert str(caught.value) == (
        "not the model that is loaded: --norm-epsilon 1e-05 (the model has 1e-06); "
        "--rotary-base 500000.0 (the model has 10000.0); --num-layers 5 (the model has 4); "
        "--add-qkv-bias (not in this model): drop these flags"
    )


def test_an_epsilon_out_of_32_bits_is_the_one_that_scripts_say() -> None:
    check(DENSE.model_copy(update={"norm_epsilon": 9.999999747378752e-06}), norm_epsilon=1e-5)


def test_flags_of_experts_and_latent_attention_are_those_of_the_model() -> None:
    check(LATENT, **SIZES, **KINDS)
    llama3 = RotaryConfig(
        scaling="llama3", factor=8.0, low_frequency_factor=2.0, high_frequency_factor=5.0
    )
    scaled = DENSE.model_copy(update={"rotary": llama3})
    check(scaled, rope_scaling_type="llama3", low_freq_factor=2.0, high_freq_factor=5.0)
    for name in ("low_freq_factor", "high_freq_factor"):
        with pytest.raises(ConfigError, match=f"{name.replace('_', '-')} 3.0 .the model has"):
            check(scaled, **{name: 3.0})


@pytest.mark.parametrize("name", SIZES)
def test_a_size_of_another_model_is_named_as_it_was_given(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError) as caught:
        check(LATENT, **{name: SIZES[name] + 1})
    assert f"loaded: {flag} {SIZES[name] + 1} (" in str(caught.value)
    if name not in ("mtp_num_layers", "rotary_base", "first_k_dense_replace"):
        with pytest.raises(ConfigError, match=f"{flag} .* .the model has"):
            check(DENSE, **{name: SIZES[name]})


def test_a_kind_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        check(DENSE, **KINDS)
    for name in KINDS.keys() - {"rotary_percent"}:
        assert f"--{name.replace('_', '-')} " in str(caught.value)
    with pytest.raises(ConfigError, match="--moe-router-score-function softmax .*has sigmoid"):
        check(LATENT, moe_router_score_function="softmax")
    with pytest.raises(ConfigError, match="rotary_percent=0.5 is not allowed"):
        check(DENSE, rotary_percent=0.5)


def test_factors_that_change_nothing_fit_a_model_without_them() -> None:
    plain = LATENT.moe.model_copy(
        update={"num_groups": None, "group_topk": None, "topk_scaling_factor": None}
    )
    model = LATENT.model_copy(update={"moe": plain})
    check(model, moe_router_num_groups=1, topk_group=1, routed_scaling_factor=1.0)
    check(DENSE, mtp_num_layers=0)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("1", [1, 1, 1, 1]),
        ("2", [1, 0, 1, 0]),
        ("([0]*1+[1]*3)", [0, 1, 1, 1]),
        ("[0, 1]*2", [0, 1, 0, 1]),
        ("[0,1,1,1]", [0, 1, 1, 1]),
    ],
)
def test_patterns_of_layers_with_experts(text: str, layers: list[int]) -> None:
    assert parse_pattern(text, 4) == [bool(layer) for layer in layers]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(
            (text, "give a number, or a pattern such as")
            for text in ("0", "x", "[2]*4", "", "[0]+")
        ),
        ("__import__('os').getcwd()", "give a number"),
        ("[0]*2+[1]", "is for 3 layers, and the model has 4"),
    ],
)
def test_what_is_no_pattern_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_pattern(text, 4)


def test_no_op_layers_count_in_a_pattern() -> None:
    check(LATENT, noop_layers="1,4", moe_layer_freq="([0]*2+[1]*4)", num_layers=6)
    with pytest.raises(ConfigError) as caught:
        check(LATENT, noop_layers="1,4", moe_layer_freq="([0]*3+[1]*3)")
    assert str(caught.value) == (
        "not the model that is loaded: --moe-layer-freq ([0]*3+[1]*3) (layers with experts in the "
        "model: 3, of which layer 1 is the first): drop these flags"
    )


def test_what_only_a_config_says_is_refused_without_one() -> None:
    needed = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "vocab_size": 99}
    sizes = needed | {"num_attention_heads": 4, "from_scratch": True}
    assert find_shape(TrainOptions(**sizes, rotary_percent=1.0))[0].hidden_size == 32
    with pytest.raises(ConfigError, match="--num-experts 4: there is no config.json"):
        find_shape(TrainOptions(**sizes, num_experts=4))
    latent = build(TrainOptions, sizes | {"multi_head_latent_attention": True}, source="a test")
    with pytest.raises(ConfigError, match="--multi-head-latent-attention: such models have a conf"):
        find_shape(latent)
