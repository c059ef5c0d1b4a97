"""Which memory features go together, and the one line for those that do not."""

import pytest

from mindspeed.config import ConfigError, Spelling, build
from mindspeed.features.base import Context
from mindspeed.features.registry import registry
from mindspeed.features.selection import select

BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}


def chosen(options, megatron):
    registered = registry()
    return select(
        registered, build(registered.options_class, options), Context(Spelling.FLAG, megatron)
    )


@pytest.mark.parametrize(
    "name", ["recompute_activation_function", "recompute_norm", "swap_attention"]
)
@pytest.mark.parametrize(
    ("megatron", "reason"),
    [
        (BLOCK | {"recompute_method": "uniform"}, "use --recompute-method block"),
        ({"recompute_granularity": "selective"}, "--recompute-granularity selective exclude"),
        ({"recompute_activations": True}, "--recompute-activations exclude"),
        (BLOCK, None),
        ({}, None),
    ],
    ids=str,
)
def test_recompute_of_parts_beside_megatrons(name, megatron, reason):
    if reason is None:
        assert chosen({name: True}, megatron)
        return
    with pytest.raises(ConfigError, match=reason) as error:
        chosen({name: True}, megatron)
    assert str(error.value).startswith("--" + name.replace("_", "-"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["recompute_activation_function", "recompute_norm"])
def test_no_more_layers_than_there_are(name):
    options = {name: True, f"{name}_num_layers": 4}
    assert chosen(options, {"num_layers": 4}) and chosen(options, {})
    with pytest.raises(ConfigError, match="-num-layers 4: the model has 3 layers: use at most so"):
        chosen(options, {"num_layers": 3})


@pytest.mark.parametrize(
    ("options", "megatron", "reason"),
    [
        ({}, {}, "needs --bf16"),
        ({}, {"bf16": True, "optimizer": "sgd"}, "needs --optimizer adam, not sgd"),
        ({}, {"bf16": True, "optimizer_cpu_offload": True}, "--optimizer-cpu-offload exclude"),
        ({}, {"bf16": True, "use_megatron_fsdp": True}, "--use-megatron-fsdp exclude"),
        ({}, {"bf16": True, "exp_avg_sq_dtype": "fp8"}, "needs --exp-avg-sq-dtype fp32, not fp8"),
        ({"optimizer_selection": "fused_ema_adamw"}, {"bf16": True}, "cannot be used together"),
        ({}, {"bf16": True}, None),
        ({}, {"bf16": True, "use_distributed_optimizer": True}, None),
    ],
    ids=str,
)
def test_what_parameter_reuse_needs(options, megatron, reason):
    options = {"reuse_fp32_param": True} | options
    if reason is None:
        assert chosen(options, megatron)
        return
    with pytest.raises(ConfigError, match=reason) as error:
        chosen(options, megatron)
    assert "--reuse-fp32-param" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", ["exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"])
def test_optimizer_swap_needs_state_in_float32(dtype):
    name = "--" + dtype.replace("_", "-")
    with pytest.raises(ConfigError, match=f"--swap-optimizer needs {name} fp32, not bf16"):
        chosen({"swap_optimizer": True}, {"bf16": True, dtype: "bf16"})


@pytest.mark.parametrize(
    ("megatron", "reason"),
    [
        ({"mtp_num_layers": 1}, "--tiled-loss-size and --mtp-num-layers exclude each other"),
        ({"cpu_offloading": True}, "--tiled-loss-size and --cpu-offloading exclude each other"),
        ({"use_megatron_fsdp": True}, "--tiled-loss-size and --use-megatron-fsdp exclude"),
        ({"config_logger_dir": "logs"}, "--tiled-loss-size and --config-logger-dir exclude"),
        ({"hidden_vocab_rows": 29}, "29 of its rows are padding: use --make-vocab-size-divisible"),
    ],
    ids=str,
)
def test_output_layers_that_no_tiled_loss_serves(megatron, reason):
    options = {"tiled_loss_size": 4, "linear_cross_entropy": True}
    with pytest.raises(ConfigError, match=reason):
        chosen(options, megatron)
    assert chosen(options, {})


@pytest.mark.parametrize("names", ["attention", "self_attention,mlp", ",", ""])
def test_unknown_modules_to_swap(names):
    with pytest.raises(ConfigError, match="--swap-modules .*: use a comma-separated list of input"):
        chosen({"swap_attention": True, "swap_modules": names}, {})


MEMORY = {
    "recompute_activation_function": True,
    "recompute_norm": True,
    "reuse_fp32_param": True,
    "swap_attention": True,
}


@pytest.mark.parametrize("megatron", [{}, BLOCK, {"use_distributed_optimizer": True}], ids=str)
def test_all_of_them_go_together(megatron):
    on = {choice.feature.name for choice in chosen(MEMORY, megatron | {"bf16": True}) if choice.on}
    names = {"recompute_activation", "recompute_norm", "reuse_fp32_param", "swap_attention"}
    assert names <= on


def test_offloading_whole_layers_is_refused():
    with pytest.raises(ConfigError, match="--cpu-offloading exclude"):
        chosen({"swap_attention": True}, {"cpu_offloading": True})
