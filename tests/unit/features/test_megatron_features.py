"""Layouts that Megatron cannot build are refused in one line before any rank starts."""

import pytest

from mindspeed.config import ConfigError, Spelling
from mindspeed.features.base import Context
from mindspeed.features.registry import registry
from mindspeed.features.selection import select

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP = "num_layers_per_virtual_pipeline_stage"


def on(**arguments):
    context = Context(Spelling.FLAG, {"world_size": 1, **arguments})
    chosen = select(registry(), registry().options_class(), context)
    return {choice.feature.name for choice in chosen if choice.on and choice.feature.is_native}


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({}, set()),
        ({"world_size": 2}, {"data_parallel"}),
        ({"world_size": 2, TP: 2, "num_attention_heads": 4}, {"tensor_parallel"}),
        (
            {"world_size": 4, TP: 2, "sequence_parallel": True},
            {"data_parallel", "tensor_parallel", "sequence_parallel"},
        ),
        # Megatron ignores the flag on one rank, with a warning of its own.
        ({"sequence_parallel": True}, set()),
        ({"world_size": 2, PP: 2, "num_layers": 4}, {"pipeline_parallel"}),
        (
            {"world_size": 2, PP: 2, "num_layers": 8, VPP: 2},
            {"pipeline_parallel", "virtual_pipeline"},
        ),
        ({"use_distributed_optimizer": True}, {"distributed_optimizer"}),
        (
            {
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
            },
            {"distributed_optimizer", "async_ddp", "overlap_param_gather"},
        ),
        ({"recompute_activations": True}, {"recompute"}),
        ({"recompute_granularity": "full", "recompute_method": "block"}, {"recompute"}),
        # Unequal pipeline stages.
        (
            {"world_size": 2, PP: 2, "num_layers": 3, "decoder_first_pipeline_num_layers": 1},
            {"pipeline_parallel"},
        ),
        ({"world_size": 4, "global_batch_size": 8, "micro_batch_size": 2}, {"data_parallel"}),
        ({"world_size": 2, TP: 2, "num_query_groups": 1}, {"tensor_parallel"}),
    ],
)
def test_what_is_on(arguments, expected):
    assert on(**arguments) == expected


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"world_size": 3, TP: 2}, "3 rank(s) cannot hold --tensor-model-parallel-size 2 = 2"),
        (
            {"world_size": 3, TP: 3, "num_attention_heads": 8},
            "--tensor-model-parallel-size 3 does not divide --num-attention-heads 8: use 1, or",
        ),
        (
            {
                "world_size": 2,
                TP: 2,
                "num_attention_heads": 6,
                "num_query_groups": 3,
                "group_query_attention": True,
            },
            "--tensor-model-parallel-size 2 does not divide --num-query-groups 3",
        ),
        (
            {"world_size": 2, PP: 2, "num_layers": 5},
            "--pipeline-model-parallel-size 2 does not divide --num-layers 5: use 1, or another",
        ),
        (
            {"world_size": 2, PP: 2, "num_layers": 8, VPP: 3},
            "--num-layers-per-virtual-pipeline-stage 3 does not divide the 4 layers of a pipeline",
        ),
        (
            {"num_layers": 8, VPP: 2},
            "--num-layers-per-virtual-pipeline-stage needs --pipeline-model-parallel-size: add",
        ),
        (
            {"overlap_param_gather": True, "overlap_grad_reduce": True},
            "--overlap-param-gather needs --use-distributed-optimizer: add",
        ),
        (
            {"overlap_param_gather": True, "use_distributed_optimizer": True},
            "--overlap-param-gather needs --overlap-grad-reduce: add",
        ),
        (
            {"recompute_granularity": "full"},
            "--recompute-granularity full needs --recompute-method uniform or block",
        ),
        (
            {"recompute_activations": True, "recompute_method": "block"},
            "--recompute-method block is for --recompute-granularity full: add that flag or drop",
        ),
        (
            {"world_size": 4, "global_batch_size": 6, "micro_batch_size": 1},
            "--global-batch-size 6 is not a multiple of 4 (--micro-batch-size 1 x 4 data-parallel",
        ),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ConfigError) as raised:
        on(**arguments)
    assert str(raised.value).startswith(message)


def test_other_sharded_optimizers_serve_the_gather_overlap_too():
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    for sharded in ({"use_megatron_fsdp": True}, {"optimizer": "dist_muon"}):
        assert "overlap_param_gather" in on(**overlap, **sharded)
