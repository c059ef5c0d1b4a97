"""What a config.json means for Megatron's configuration, value by value."""

import pytest

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed_llm.models.config import MoEConfig
from mindspeed_llm.models.hf_config import HfConfig
from mindspeed_llm.models.megatron import transformer_config
from mindspeed_llm.models.registry import family_named

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}


def shape_of(**changes):
    return family_named("llama").read_config(HfConfig(CONFIG | changes, "config.json"), ())


@pytest.mark.parametrize(
    ("changes", "base"),
    [
        ({}, 10000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6}}, 1e6),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 5e5),
    ],
)
def test_the_rotary_base_is_found_in_both_places(changes, base):
    assert shape_of(**changes).rotary.base == base


HEAD = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("said", "tensors", "is_tied"),
    [
        (None, (), False),
        (None, HEAD, False),
        (None, HEAD[:1], True),
        (True, HEAD, True),
        (False, HEAD[:1], False),
    ],
)
def test_an_output_layer_is_tied_where_the_config_says_so_or_there_is_none(said, tensors, is_tied):
    config = HfConfig(CONFIG | {"tie_word_embeddings": said}, "config.json")
    assert family_named("llama").read_config(config, tensors).tied is is_tied


def test_a_window_counts_the_token_itself():
    windowed = shape_of().model_copy(update={"sliding_window": 7})
    assert transformer_config(windowed).window_size == (6, 0)
    assert transformer_config(shape_of()).window_size is None


def experts(**changes):
    kinds = (False, True, False, True)
    values = {"num_experts": 4, "topk": 2, "ffn_hidden_size": 16, "is_moe_layer": kinds}
    return shape_of().model_copy(update={"moe": MoEConfig(**values | changes)})


@pytest.mark.parametrize("is_normalized", [False, True])
def test_softmax_comes_first_where_the_weights_of_the_chosen_need_not_sum_to_one(is_normalized):
    config = transformer_config(experts(normalize_topk=is_normalized))
    assert config.moe_router_pre_softmax is not is_normalized
    assert config.moe_layer_freq == [0, 1, 0, 1] and config.num_moe_experts == 4


def test_layers_behind_a_noop_keep_their_kind():
    """Multi-token prediction has that of the last one, with a no-op behind it, too."""
    assert transformer_config(experts(), noop_layers=(0, 5)).moe_layer_freq == [0, 0, 1, 0, 1, 1]
    config = transformer_config(experts(), noop_layers=(1, 4))
    assert config.num_layers == 6 and config.moe_layer_freq == [0, 0, 1, 0, 0, 1]
    windows = {"window_size": 6, "window_layers": (True, False, True, False)}
    windowed = shape_of().model_copy(update=windows)
    if "window_attn_skip_freq" in vars(transformer_config(shape_of())):  # Megatron 0.12 has none
        config = transformer_config(windowed, noop_layers=(1, 4))
        assert config.window_attn_skip_freq == [1, 1, 0, 1, 1, 0]
