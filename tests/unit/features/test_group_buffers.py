"""Communicator buffers: the flags, sizes computed by hand, and the options of process groups."""

import logging
import sys
import types

import pytest
import torch
from megatron.core import parallel_state

import mindspeed
from mindspeed import device
from mindspeed.config import ConfigError, Spelling, build
from mindspeed.distributed.group_buffers import Messages, parse
from mindspeed.features import activation
from mindspeed.features.base import Context
from mindspeed.features.comm.group_buffers import plan, wrap_get_nccl_options
from mindspeed.features.registry import registry
from mindspeed.features.selection import select
from mindspeed.megatron_adaptor import repatch

# Llama-8B shape, TP 4, PP 2, CP 2, sequence 32768.
SCRIPT = {
    **{"seq_length": 32768, "micro_batch_size": 1, "hidden_size": 4096, "num_attention_heads": 32},
    **{"group_query_attention": True, "num_query_groups": 8, "bf16": True},
    **{"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2},
    **{"context_parallel_size": 2, "sequence_parallel": True},
}
EXPERTS = SCRIPT | {
    **{"context_parallel_size": 1, "num_experts": 8, "moe_router_topk": 2},
    **{"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"},
}
LATENT = {"multi_latent_attention": True, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64}
SMALL = {"mp": 10, "tp_cp": 10}
NCCL = types.SimpleNamespace(Options=None)
"""What a torch without NCCL lacks."""
SMALL_EP = SMALL | {"tp_ep_mp": 10, "tp_ep_pp": 10}


@pytest.fixture(autouse=True)
def _same_options():
    active = activation.current()
    options, preset = active.options, active.preset
    yield
    active.preset = preset
    active.activate(options)


def planned(options, megatron):
    registered, context = registry(), Context(Spelling.FLAG, megatron)
    options = build(registered.options_class, {"hccl_group_buffer_adaptive": True} | options)
    select(registered, options, context)
    return plan(options, context)


@pytest.mark.parametrize(
    ("options", "megatron", "sizes"),
    [
        # 2 bytes x 16384 positions x 4096; a quarter of them between stages; keys and values of 2
        # of 8 groups in float32.
        ({}, SCRIPT, {"tp": 128, "pp": 32, "cp": 32}),
        ({}, SCRIPT | {"sequence_parallel": False}, {"tp": 256, "pp": 128, "cp": 32}),
        ({}, SCRIPT | {"fp32_residual_connection": True}, {"tp": 128, "pp": 64, "cp": 32}),
        ({}, SCRIPT | {"group_query_attention": False}, {"tp": 128, "pp": 32, "cp": 128}),
        # A quarter of the queries and two of eight keys.
        ({}, SCRIPT | {"cp_comm_type": ["a2a"]}, {"tp": 128, "pp": 32, "cp": 48}),
        ({}, SCRIPT | {"cp_comm_type": ["all_gather"]}, {"tp": 128, "pp": 32, "cp": 64}),
        (
            {},
            SCRIPT | {"create_attention_mask_in_dataloader": True},
            {"tp": 1024, "pp": 32, "cp": 32},
        ),
        # 32 heads of 128 + 64 in keys, whatever the hidden size says.
        ({}, SCRIPT | LATENT, {"tp": 128, "pp": 32, "cp": 192}),
        ({"hccl_group_buffer": "tp:7;dp:9"}, SCRIPT, {"tp": 7, "pp": 32, "cp": 32, "dp": 9}),
        ({}, EXPERTS, {"tp": 256, "pp": 64} | SMALL_EP),
        (
            {"hccl_ep_group_buffer_adaptive_factor": 1.5},
            EXPERTS,
            {"tp": 256, "pp": 64, "ep": 192, "ep_tp": 768} | SMALL_EP,
        ),
        (
            {"hccl_ep_group_buffer_adaptive_factor": 1.5, "moe_tp_extend_ep": True},
            EXPERTS,
            {"tp": 256, "pp": 64, "ep": 192} | SMALL_EP,
        ),
        (
            {"hccl_ep_group_buffer_adaptive_factor": 1.5},
            EXPERTS | {"moe_token_dispatcher_type": "allgather"},
            {"tp": 256, "pp": 64, "tp_ep_mp": 512},
        ),
        (
            {"use_multiparameter_pipeline_model_parallel": True},
            SCRIPT,
            {"tp": 128, "cp": 32},
        ),
    ],
    ids=str,
)
def test_sizes_are_those_computed_by_hand(options, megatron, sizes):
    assert planned(options, megatron) == SMALL | sizes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dpp:2", "no group 'dpp': did you mean"),
        ("network:2", "no group 'network': use dp, dp_cp,"),
        ("tp:-3", "tp has '-3': give a whole number of MiB above 0"),
        ("tp:0", "above 0"),
        ("tp:1.5", "above 0"),
        ("tp:", "above 0"),
        ("tp", "'tp' is not group:MiB"),
        ("", "is not group:MiB"),
        ("ep:2;exp:3", "exp is given twice"),
    ],
)
def test_sizes_that_are_not_legal(text, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        planned({"hccl_group_buffer": text, "hccl_group_buffer_adaptive": False}, {})
    assert str(error.value).startswith("--hccl-group-buffer ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "megatron", "reason"),
    [
        ({"hccl_ep_group_buffer_adaptive_factor": 0.0}, EXPERTS, "factor 0.0: give a number above"),
        ({"hccl_ep_group_buffer_adaptive_factor": -2.0}, EXPERTS, "above 0"),
        ({"hccl_ep_group_buffer_adaptive_factor": 1.0}, SCRIPT, "the model has no experts"),
        ({}, SCRIPT | {"seq_length": None}, "adaptive needs --seq-length, from the arguments"),
    ],
    ids=str,
)
def test_what_cannot_be_planned(options, megatron, reason):
    with pytest.raises(ConfigError, match=reason):
        planned(options, megatron)


def test_names_and_separators_of_older_scripts():
    assert parse("dp:200, exp:400;tp_exp:5", "it") == {"dp": 200, "ep": 400, "tp_ep_mp": 5}


def test_a_factor_without_planning_has_no_effect(caplog):
    planned({"hccl_group_buffer_adaptive": False, "hccl_ep_group_buffer_adaptive_factor": 2.0}, {})
    assert "--hccl-ep-group-buffer-adaptive-factor 2.0 has no effect" in caplog.text


def test_a_small_message_gets_the_smallest_buffer():
    sizes = {"seq_length": 8, "micro_batch_size": 1, "hidden_size": 8, "query_size": 8}
    assert Messages(**sizes, kv_size=8, head_size=4, tp=2).buffers()["tp"] == 1


def test_gloo_keeps_no_buffers(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    mindspeed.enable(hccl_group_buffer="tp:300")
    with caplog.at_level(logging.WARNING):
        found = [parallel_state.get_nccl_options(name, {}) for name in ("dp", "tp", "tp")]
    assert found == [None] * 3
    said = "--hccl-group-buffer tp:300 has no effect: gloo keeps no buffers by communicator"
    assert caplog.text.count(said) == 1


def test_planning_needs_the_arguments_of_a_run():
    mindspeed.enable(hccl_group_buffer_adaptive=True)
    with pytest.raises(ConfigError, match="hccl_group_buffer_adaptive needs --seq-length"):
        parallel_state.get_nccl_options("tp", {})


def test_planning_takes_what_a_client_knows():
    """A dictionary is not complete: what it lacks may be Megatron's default."""
    client = {"hccl_group_buffer_adaptive": True} | SCRIPT
    repatch(client)
    active = activation.current()
    assert plan(active.options, active.context) == SMALL | {"tp": 128, "pp": 32, "cp": 32}
    with pytest.raises(ConfigError, match="adaptive needs --hidden-size, from the arguments of a"):
        repatch({name: value for name, value in client.items() if name != "hidden_size"})


UNSET = -(2**31)


@pytest.mark.parametrize(
    ("max_ctas", "min_ctas", "size", "expected"),
    [
        (UNSET, UNSET, "", 3),
        (UNSET, 8, "", 8),
        (32, 1, "", 3),  # Megatron 0.12 where the file of the user has none
        (5, UNSET, "", 5),
        (UNSET, UNSET, "0x200000", 6),
    ],
)
def test_bounds_of_the_user_stay(monkeypatch, caplog, max_ctas, min_ctas, size, expected):
    monkeypatch.setenv("NCCL_BUFFSIZE", size)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NCCL, raising=False)
    config = types.SimpleNamespace(max_ctas=max_ctas, min_ctas=min_ctas)
    found = device.known()["cuda"].group_options(12, types.SimpleNamespace(config=config))
    assert found.config.max_ctas == expected
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (max_ctas == 5)


@pytest.mark.parametrize("size", ["4M", "0", "-1"])
def test_a_size_of_nccl_buffers_that_is_no_number(monkeypatch, size):
    monkeypatch.setenv("NCCL_BUFFSIZE", size)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NCCL, raising=False)
    mindspeed.enable(hccl_group_buffer="tp:300")
    options = types.SimpleNamespace(config=types.SimpleNamespace(max_ctas=UNSET, min_ctas=UNSET))
    get = wrap_get_nccl_options(lambda name, configs: options)
    monkeypatch.setattr(device, "current", lambda: device.known()["cuda"])
    with pytest.raises(ConfigError, match=f"NCCL_BUFFSIZE={size}: give a number of bytes above 0"):
        get("tp", {})


class _HcclOptions:
    """What torch-npu's wheel has under this name: an object with a dictionary."""

    def __init__(self):
        self.hccl_config = {}


def test_hccl_gets_the_size_of_the_group(monkeypatch):
    holder = types.SimpleNamespace(Options=_HcclOptions)
    inner = types.SimpleNamespace(_distributed_c10d=types.SimpleNamespace(ProcessGroupHCCL=holder))
    torch_npu = types.ModuleType("torch_npu")
    torch_npu._C = inner
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    npu, before = device.known()["npu"], _HcclOptions()
    before.hccl_config = {"group_name": "tp"}
    assert npu.group_options(300).hccl_config == {"hccl_buffer_size": 300}
    assert npu.group_options(300, before).hccl_config == {
        "group_name": "tp",
        "hccl_buffer_size": 300,
    }
