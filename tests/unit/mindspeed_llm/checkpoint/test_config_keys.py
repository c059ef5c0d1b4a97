"""A config.json is read as transformers reads it, or refused with the key that is not read."""

import copy
import json
import re

import pytest
import transformers

from mindspeed.config import ConfigError
from mindspeed_llm.models.registry import read_model_config
from tests.llm import tiny

LLAMA2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA3_ROPE = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
LLAMA3_ROPE |= {"factor": 32.0, "original_max_position_embeddings": 8192}
QWEN25 = LLAMA2 | {
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "max_window_layers": 28,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_mrope": False,
    "use_sliding_window": False,
}
QWEN3 = QWEN25 | {"model_type": "qwen3", "head_dim": 128, "attention_bias": False}
DEEPSEEK_V2 = LLAMA2 | {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
PUBLISHED = {
    "Llama-2-7b": LLAMA2,
    "Llama-3.2-1B": LLAMA2
    | {"rope_scaling": LLAMA3_ROPE, "rope_theta": 5e5, "head_dim": 64, "mlp_bias": False}
    | {"attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": True},
    "a fine-tune of 2023": LLAMA2
    | {"max_sequence_length": 4096, "pad_token_id": 0, "_flash_attn_2_enabled": True}
    | {"temperature": 0.9, "do_sample": True, "unsloth_version": "2024.9"},
    "Mistral-7B-v0.1": LLAMA2 | {"model_type": "mistral", "sliding_window": 4096},
    "Mistral-7B-v0.3": LLAMA2 | {"model_type": "mistral", "sliding_window": None},
    "Qwen2.5-7B": QWEN25,
    "Qwen2.5-7B with yarn": QWEN25
    | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "Qwen3-8B": QWEN3 | {"rope_scaling": None, "sliding_window": None},
    "Qwen3-30B-A3B": QWEN3
    | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []}
    | {"moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128}
    | {"num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    "Mixtral-8x7B": LLAMA2
    | {"model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8}
    | {"output_router_logits": False, "router_aux_loss_coef": 0.02, "sliding_window": None},
    "gpt-oss-20b": GPT_OSS,
    "DeepSeek-V2-Lite": DEEPSEEK_V2,
    "DeepSeek-V3": DEEPSEEK_V2
    | {"model_type": "deepseek_v3", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    | {"norm_topk_prob": True, "n_group": 8, "topk_group": 4, "q_lora_rank": 1536}
    | {"num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"}},
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2"}
CLASSES |= {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss"}
CLASSES |= {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}


def test_layers_of_multi_token_prediction_are_those_of_the_weights(tmp_path):
    """Published weights may lack them; a model that is trained from scratch has those it names."""
    values = {k: v for k, v in PUBLISHED["DeepSeek-V3"].items() if k != "quantization_config"}
    layers = values["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    weights = [f"model.layers.{layers - 1}.mlp.gate.weight"]
    assert read_model_config(tmp_path).mtp_num_layers == 0
    assert read_model_config(tmp_path, weights).mtp_num_layers == 0
    weights.append(f"model.layers.{layers}.eh_proj.weight")
    assert read_model_config(tmp_path, weights).mtp_num_layers == 1
    assert read_model_config(tmp_path, from_scratch=True).mtp_num_layers == 1
    (tmp_path / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    with pytest.raises(ConfigError, match="num_nextn_predict_layers 1: needs an output layer of"):
        read_model_config(tmp_path, from_scratch=True)


@pytest.fixture
def shape_of(tmp_path):
    """Return a function that reads the shape from the values of a config.json."""

    def read(values, named=None):
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_model_config(tmp_path, named=named)

    return read


def as_transformers_reads_it(values):
    config_class = getattr(transformers, CLASSES[values["model_type"]] + "Config")
    return json.loads(config_class.from_dict(copy.deepcopy(values)).to_json_string())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(shape_of, name):
    values = PUBLISHED[name]
    assert shape_of(values) == shape_of(as_transformers_reads_it(values))


@pytest.mark.parametrize("name", tiny.MODELS)
def test_missing_keys_count_as_in_transformers(shape_of, name):
    config_class, values = tiny.MODELS[name]
    full = json.loads(getattr(transformers, config_class)(**values).to_json_string())
    compared = 0
    for key in full.keys() - {"model_type"}:
        rest = {other: value for other, value in full.items() if other != key}
        try:
            ours = shape_of(rest)
        except ConfigError as error:
            assert re.search("missing|do not divide|a bias in", str(error)), error
            continue
        theirs = as_transformers_reads_it(rest)
        if "kv_lora_rank" in rest:  # latent attention has no heads of keys
            theirs["num_key_value_heads"] = theirs["num_attention_heads"]
        assert ours == shape_of(theirs), key
        compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    "config_class", ["Granite", "SmolLM3", "Ernie4_5", "Qwen2Moe", "Olmo2", "Gemma2", "Phi3"]
)
@pytest.mark.parametrize("named", ["llama", None])
def test_other_architectures(shape_of, config_class, named):
    values = json.loads(getattr(transformers, config_class + "Config")().to_json_string())
    with pytest.raises(ConfigError) as caught:
        shape_of(values, named)
    assert f"model_type {values['model_type']} is not supported" in str(caught.value)
    assert "supported: deepseek_v2, deepseek_v3, gpt_oss, llama, mistral" in str(caught.value)
    assert "did you mean" not in str(caught.value) and "\n" not in str(caught.value)


KEYS = [
    ({"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}, "scale_emb is 12 (only 1 is)"),
    ({"scale_depth": 1.4}, "scale_depth is 1.4"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
    ({"attention_multiplier": 0.0078125}, "attention_multiplier"),
    ({"logits_scaling": 8.0}, "logits_scaling"),
    ({"residual_multiplier": 0.22}, "residual_multiplier"),
    ({"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 (only 1 is)"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"sliding_window": 512}, "sliding_window is 512"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"attention_dropout": 0.1}, "attention_dropout is 0.1 (only 0 is)"),
    ({"use_qk_norm": True}, "use_qk_norm is True"),
    ({"is_causal": False}, "is_causal is False (only True is)"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"mlp_bias": True}, "there is a bias in the MLP"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0: it must be above 0"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05: it must be above 0"),
    ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": 2}}, "only 1.13863"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": 0.5}}, "or neither"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "truncate": "no"}}, "true or false"),
    ({"rope_scaling": {"mrope_section": [1, 2]}}, "mrope_section is [1, 2]"),
    ({"rope_scaling": {"full_attention": {"rope_theta": 1e6}}}, "full_attention is"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e6}},
        "rope_scaling and rope_parameters differ",
    ),
]


@pytest.mark.parametrize("values, message", KEYS, ids=str)
def test_keys_that_are_not_read(shape_of, values, message):
    for model_type in ("llama", "minicpm"):
        with pytest.raises(ConfigError) as caught:
            shape_of(LLAMA2 | {"model_type": model_type} | values, "llama")
        assert message in str(caught.value) and "config.json: " in str(caught.value)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"norm_topk_prob": True}, "norm_topk_prob is True: only False is supported"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid': only softmax is supported"),
        ({"sliding_window": 512}, "sliding_window is 512"),
    ],
)
def test_keys_of_deepseek(shape_of, values, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(DEEPSEEK_V2 | values)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"num_experts_per_tok": 65}, "num_experts_per_tok is 65: a token can choose among 64"),
        ({"n_group": 8, "topk_group": 9}, "topk_group is 9, n_group 8, with 64 experts"),
        ({"n_group": 3}, "n_group 3, with 64 experts: n_group must divide them"),
        ({"n_group": 16, "topk_group": 1}, "num_experts_per_tok is 6: a token can choose among 4"),
        ({"aux_loss_alpha": -0.1}, "factor of the auxiliary loss is -0.1: it must be at least 0"),
    ],
)
def test_numbers_by_which_no_router_can_choose(shape_of, values, message):
    grouped = DEEPSEEK_V2 | {"topk_method": "group_limited_greedy"}
    shape_of(grouped | {"n_group": 16, "topk_group": 2})
    with pytest.raises(ConfigError, match=message):
        shape_of(grouped | values)


def test_windows_of_some_layers(shape_of):
    """The window of Qwen2 begins at a layer: all layers have it, or none, or it is an error."""
    windowed = QWEN25 | {"use_sliding_window": True, "sliding_window": 256}
    assert shape_of(windowed).sliding_window is None  # 28 layers from layer 28 on
    assert shape_of(windowed | {"max_window_layers": 0}).sliding_window == 256
    assert shape_of(QWEN25 | {"max_window_layers": 0}).sliding_window is None
    with pytest.raises(ConfigError, match="with and without a sliding window are mixed"):
        shape_of(windowed | {"max_window_layers": 21})


@pytest.mark.parametrize("classes", [None, [], ["LlamaForCausalLM"]])
def test_a_config_becomes_that_of_a_scorer(tmp_path, classes):
    """Also one that names no class: the family is the same."""
    from transformers import LlamaConfig

    from mindspeed_llm.models.hf_config import set_num_labels
    from mindspeed_llm.models.registry import read_model_config

    LlamaConfig(architectures=classes, num_hidden_layers=1).save_pretrained(tmp_path)
    set_num_labels(tmp_path / "config.json", 1)
    config = LlamaConfig.from_pretrained(tmp_path)
    assert config.architectures == ["LlamaForSequenceClassification"] and config.num_labels == 1
    assert read_model_config(tmp_path).num_labels == 1


@pytest.mark.parametrize(
    ("given", "is_end"),
    [(None, False), (7, False), (None, True)],
    ids=["of the tokenizer", "of the model", "also an end"],
)
def test_a_scorer_pads_batches_with_a_token_that_ends_nothing(tmp_path, given, is_end):
    """Scores are those of the last token that is no padding: of the one before an end otherwise."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from mindspeed_llm.models.hf_config import set_num_labels
    from tests.small_tokenizers import byte_level

    byte_level().save_pretrained(tmp_path)
    padding = byte_level().pad_token_id
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 500}
    ids = {"pad_token_id": given, "eos_token_id": [5, padding] if is_end else 5}
    LlamaConfig(num_attention_heads=2, **sizes, **ids).save_pretrained(tmp_path)
    set_num_labels(tmp_path / "config.json", 1)
    config = LlamaConfig.from_pretrained(tmp_path)
    assert config.pad_token_id == (None if is_end else given or padding)
    if not is_end:
        model = LlamaForSequenceClassification(config).eval()
        batch = torch.tensor([[1, 2, 5, config.pad_token_id], [1, 2, 3, 5]])
        assert torch.allclose(model(batch).logits[0], model(batch[:1, :3]).logits[0], atol=1e-6)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"pad_token": 3}', b'{"pad_token": {}}'])
def test_a_scorer_without_a_padding_token(tmp_path, content):
    from transformers import LlamaConfig

    from mindspeed_llm.models.hf_config import set_num_labels

    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": []}')
    set_num_labels(tmp_path / "config.json", 1)
    assert LlamaConfig.from_pretrained(tmp_path).pad_token_id is None
