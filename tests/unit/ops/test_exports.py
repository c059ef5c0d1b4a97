"""Every operator of the documents imports from mindspeed.ops, runs on a cpu and compiles."""

import subprocess
import sys

import pytest
import torch

import mindspeed.ops
from tests.unit.ops.exported_calls import BREAKS, CALLS, find, results

DOCUMENTED = (
    "npu_dropout_add_layer_norm",
    "npu_rotary_position_embedding",
    "npu_fusion_attention",
    "npu_rms_norm",
    "npu_swiglu",
    "npu_mm_all_reduce_add_rms_norm",
    "npu_mm_all_reduce_add_rms_norm_",
    "npu_gmm",
    "npu_grouped_mat_mul_all_reduce",
    "npu_fused_moe_token_permute",
    "npu_fused_moe_token_unpermute",
    "npu_ring_attention_update",
    "npu_matmul_add_fp32",
    "npu_groupmatmul_add_fp32",
    "npu_apply_fused_ema_adamw",
    "coc_ops",
    "npu_ffn",
    "npu_all_to_all_all_gather_bmm",
    "npu_bmm_reduce_scatter_all_to_all",
    "npu_quant_gmm",
)


def test_everything_documented_is_exported():
    assert set(DOCUMENTED) <= set(mindspeed.ops.__all__)


def test_every_export_is_called_here():
    assert {name.partition(".")[0] for name in CALLS} == set(mindspeed.ops.__all__)


@pytest.fixture
def one_rank():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", CALLS)
def test_it_runs_on_a_cpu(name, one_rank):
    found = results(find(name), CALLS[name]())
    assert found and all(bool(torch.isfinite(x).all()) for x in found)


def test_they_compile():
    """Without a break in the graph, but for those that say why not."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.ops.exported_calls", *CALLS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert set(done.stdout.split()) == set(CALLS), done.stderr
    assert BREAKS.keys() < CALLS.keys()
