"""Adapters that are loaded must add what this run computes."""

import json

import pytest
import torch
from safetensors.torch import save_file

from mindspeed.config import ConfigError
from mindspeed_llm.training.lora_plan import check_has_no_adapters, plan_lora
from mindspeed_llm.training.options import TrainOptions
from tests.unit.mindspeed_llm.training.shapes import DENSE


def save_adapter(folder, *others, layer="model.layers.0.self_attn.q_proj"):
    """Save an adapter as peft does, and other weights beside it."""
    names = [f"{layer}.lora_{letter}.weight" for letter in "AB"]
    tensors = {f"base_model.model.{name}": torch.zeros(8, 8) for name in (*names, *others)}
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"lora_alpha": 16}, "--lora-alpha 32: the adapters in .* have 16: give --lora-alpha 16"),
        ({"r": 4}, "--lora-r 8: the adapters in .* have 4: give --lora-r 4"),
        ({"use_rslora": True}, "adapter_config.json has use_rslora True, which is not supported"),
        ({"alpha_pattern": {"q_proj": 4}}, "has alpha_pattern {'q_proj': 4}"),
        ({"r": float("inf")}, "adapter_config.json: cannot be read"),
    ],
)
def test_the_config_of_loaded_adapters_must_be_that_of_the_run(tmp_path, saved, message):
    config = {"r": 8, "lora_alpha": 32, "use_rslora": False, "alpha_pattern": {}}
    options = TrainOptions(lora_r=8, lora_load=str(tmp_path))
    save_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert plan_lora(options, DENSE).alpha == 32
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | saved))
    with pytest.raises(ConfigError, match=message):
        plan_lora(options, DENSE)


@pytest.mark.parametrize(
    ("others", "changes", "message"),
    [
        (["model.layers.0.mlp.gate.weight"], {}, "has model.layers.0.mlp.gate.weight, and only"),
        (["model.layers.0.self_attn.q_proj.lora_B.bias"], {}, "lora_B.bias, and only adapters"),
        ([], {"lora_target_modules": ("v_proj",)}, "does not name: add q_proj to it"),
        (["model.layers.9.mlp.up_proj.lora_A.weight"], {}, "does not name: it is of another model"),
    ],
)
def test_loaded_weights_that_would_be_left_out_are_refused(tmp_path, others, changes, message):
    options = TrainOptions(lora_r=8, lora_load=str(tmp_path), **changes)
    save_adapter(tmp_path, *others)
    with pytest.raises(ConfigError, match=message):
        plan_lora(options, DENSE)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_alpha": 16.0},
        {"lora_dropout": 0.1},
        {"lora_target_modules": ("q_proj",)},
        {"lora_train_router": True},
    ],
)
def test_a_forgotten_rank_does_not_train_all_weights(changes):
    (name,) = changes
    assert plan_lora(TrainOptions(), DENSE) is None
    message = f"^--{name.replace('_', '-')}: without --lora-r or --lora-load there are no adapters"
    check_has_no_adapters(TrainOptions())
    with pytest.raises(ConfigError, match=message):
        check_has_no_adapters(TrainOptions(**changes))


def test_what_is_no_folder_of_peft_is_named(tmp_path):
    """A training checkpoint has its adapters in shards, under Megatron's names."""
    options = TrainOptions(lora_r=8, lora_load=str(tmp_path))
    missing = f"--lora-load {tmp_path}: there is no adapter_model.safetensors in it"
    with pytest.raises(ConfigError, match=f"{missing}: give a folder of peft$"):
        plan_lora(options, DENSE)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    advice = f"it is a training checkpoint: .* mindspeed-llm export-lora {tmp_path} DIR, and give"
    with pytest.raises(ConfigError, match=f"{missing}: {advice}"):
        plan_lora(options, DENSE)
