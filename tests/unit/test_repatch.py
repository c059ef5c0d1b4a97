"""`repatch` selects features from the arguments of other projects."""

import argparse
from types import SimpleNamespace

import pytest
from megatron.core.transformer.dot_product_attention import DotProductAttention

import mindspeed
from mindspeed.config import ConfigError
from mindspeed.features.activation import current
from mindspeed.megatron_adaptor import repatch


@pytest.fixture(autouse=True)
def _same_options():
    options, preset = current().options, current().preset
    yield
    current().preset = preset
    current().activate(options)


def is_on(name):
    return name in mindspeed.report().on


def is_patched():
    return "/mindspeed/te/" in DotProductAttention.forward.__code__.co_filename


@pytest.mark.parametrize("make", [dict, SimpleNamespace, argparse.Namespace])
def test_options_are_taken_and_other_names_left_to_the_client(make):
    repatch(make(use_flash_attn=True, context_parallel_size=1, learning_rate=1e-5, model=None))
    assert is_on("flash_attention") and is_patched()
    repatch(make(use_flash_attn=False))
    assert not is_on("flash_attention") and not is_patched()


def test_old_names_of_options_are_taken():
    repatch({"swiglu_in_product": False})
    assert current().options.fuse_swiglu_gemm is False
    with pytest.raises(
        ConfigError, match="swiglu_in_product needs a Hopper GPU.* or drop swiglu_in_product"
    ):
        repatch({"swiglu_in_product": True, "use_fused_swiglu": True})


def test_none_is_not_set_and_each_call_starts_from_what_python_set():
    mindspeed.enable(use_fused_swiglu=True)
    repatch({"use_fused_swiglu": None, "use_flash_attn": True})
    assert is_on("fused_swiglu") and is_on("flash_attention")
    repatch({"optimization_level": 0})
    assert not is_on("fused_swiglu") and not is_on("flash_attention")
    repatch({})
    assert is_on("fused_swiglu") and not is_on("flash_attention")


def test_a_misspelt_name_is_one_warning(caplog):
    names = ("use_fused_swigul", "use_flash_atn", "noop_layres", "use-fused-swiglu")
    for _ in range(2):
        repatch(dict.fromkeys(names, True))
    assert not is_on("fused_swiglu")
    text = "repatch: {} is no option of MindSpeed: did you mean {}?"
    ours = ("use_fused_swiglu", "use_flash_attn", "noop_layers", "use_fused_swiglu")
    assert [r.getMessage() for r in caplog.records] == [*map(text.format, names, ours)]


def test_names_of_megatron_and_of_clients_are_not_warned_of(caplog):
    others = {
        "gradient_accumulation_fusion": True,  # Megatron's; gemm_gradient_accumulation_fusion
        "recompute_num_layers": 1,
        "num_shared_experts": 2,  # clients'; n_shared_experts
        "csa_window_size": 4,
        "no_rope_layers": [1],
        "use_fused_swiglus": False,  # not set
        "use_flash_attm": None,
    }
    repatch(others)
    assert not caplog.records


def test_wrong_values_change_nothing():
    repatch({"use_flash_attn": True})
    with pytest.raises(ConfigError, match="optimization_level=7 is not allowed"):
        repatch({"optimization_level": 7})
    assert is_on("flash_attention") and is_patched()


def test_only_the_namespace_of_a_parser_is_complete():
    native = {"overlap_param_gather": True, "use_distributed_optimizer": True}
    repatch(native)
    assert not is_on("overlap_param_gather"), "a dictionary leaves Megatron's own options open"
    repatch(argparse.Namespace(**native, overlap_grad_reduce=True))
    assert is_on("overlap_param_gather")
    with pytest.raises(ConfigError, match="overlap-grad-reduce|async_ddp"):
        repatch(argparse.Namespace(**native))
