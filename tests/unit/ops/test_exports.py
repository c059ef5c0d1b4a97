"""Every operator of the documents imports from mindspeed.ops, runs on a cpu and compiles."""

import os
import subprocess
import sys

import pytest
import torch

import mindspeed.ops
from mindspeed.ops.dispatch import known_ops
from tests.unit.ops.exported_calls import BREAKS, CALLS, find, results
from tests.unit.ops.traced_kernels import targets

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


def test_every_operator_is_called_here():
    exports = {name.partition(".")[0] for name in CALLS if ":" not in name}
    assert exports == set(mindspeed.ops.__all__)
    called = {find(name).name for name in CALLS if not name.startswith("coc_ops")}
    assert called == set(known_ops())


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


def test_their_kernels_are_traced_whole():
    """As the GPU would run them; interpreted kernels cannot be traced, so in a process without."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.ops.traced_kernels", *targets()]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert set(done.stdout.split()) == targets().keys(), done.stderr
    assert len(targets()) > 20
