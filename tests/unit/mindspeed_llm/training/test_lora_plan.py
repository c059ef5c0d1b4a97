"""Adapters that are loaded must add what this run computes."""

import json

import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.training.lora_plan import plan_lora
from mindspeed_llm.training.options import TrainOptions
from tests.unit.mindspeed_llm.training.test_setup import SHAPE


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
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert plan_lora(options, SHAPE).alpha == 32
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | saved))
    with pytest.raises(ConfigError, match=message):
        plan_lora(options, SHAPE)
