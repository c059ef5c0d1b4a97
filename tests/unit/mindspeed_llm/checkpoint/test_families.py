"""What every family keeps: types, layouts, the output layer, biases the config does not name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.checkpoint import ConvertOptions
from mindspeed_llm.checkpoint.conversion import convert

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek2", "deepseek3"]
FAMILIES += ["gpt_oss"]
SPREAD = {"target_tensor_parallel_size": 2, "target_pipeline_parallel_size": 2}
FLOAT32 = "correction_bias"
"""The one kind of weight that stays in float32 whatever is asked for."""


def to_mcore(source, target, kind="hf", **options):
    kinds = {"load_model_type": kind, "save_model_type": "mg"}
    convert(ConvertOptions(load_dir=str(source), save_dir=str(target), **kinds, **options))
    return target


def to_hf(source, target, **options):
    kinds = {"load_model_type": "mg", "save_model_type": "hf"}
    convert(ConvertOptions(load_dir=str(source), save_dir=str(target), **kinds, **options))
    return load_file(target / "model.safetensors")


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def change_config(model, **values):
    path = model / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("name", FAMILIES)
def test_params_dtype(models, tmp_path, name):
    original = load_file(models[name] / "model.safetensors")
    mcore = to_mcore(models[name], tmp_path / "mg", params_dtype="bf16", **SPREAD)
    expected = {n: t if FLOAT32 in n else t.bfloat16() for n, t in original.items()}
    assert_same(to_hf(mcore, tmp_path / "hf"), expected)
    again = to_hf(mcore, tmp_path / "fp32", params_dtype="fp32")
    assert_same(again, {n: t.float() for n, t in expected.items()})


@pytest.mark.parametrize("name", FAMILIES)
def test_resharding(models, tmp_path, name):
    first = to_mcore(models[name], tmp_path / "first", **SPREAD)
    second = to_mcore(first, tmp_path / "second", "mg", num_layer_list=(1, 3), **SPREAD)
    third = to_mcore(second, tmp_path / "third", "mg", noop_layers=(1, 4), **SPREAD)
    original = load_file(models[name] / "model.safetensors")
    assert_same(to_hf(third, tmp_path / "hf"), original)


@pytest.mark.parametrize("name", FAMILIES)
def test_tied_and_untied(models, tmp_path, name):
    """The family with the other kind of output layer than the one that the tests have."""
    model = shutil.copytree(models[name], tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    if "lm_head.weight" in tensors:
        del tensors["lm_head.weight"]
    else:
        tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    change_config(model, tie_word_embeddings="lm_head.weight" not in tensors)
    mcore = to_mcore(model, tmp_path / "mg", make_vocab_size_divisible_by=32, **SPREAD)
    assert_same(to_hf(mcore, tmp_path / "hf"), tensors)


def test_biases_that_no_flag_and_no_config_names(models, tmp_path):
    """Qwen2.5 under the name llama2, as the document has it, from a config without a model_type."""
    model = shutil.copytree(models["qwen2"], tmp_path / "model")
    change_config(model, model_type=None, architectures=None)
    original = load_file(model / "model.safetensors")
    assert any(name.endswith("q_proj.bias") for name in original)
    mcore = to_mcore(model, tmp_path / "mg", model_type_hf="llama2", **SPREAD)
    assert_same(to_hf(mcore, tmp_path / "hf", model_type_hf="llama2"), original)
