"""What the features of the pipeline need, and which of them go together: one line each."""

import pytest

from mindspeed.config import ConfigError, Spelling, build
from mindspeed.features.base import Context
from mindspeed.features.registry import registry
from mindspeed.features.selection import select

PP = {"world_size": 2, "pipeline_model_parallel_size": 2, "num_layers": 4}
VPP = PP | {"num_layers_per_virtual_pipeline_stage": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}

ZB = {"schedules_method": "zb-h1"}
SEVERAL = {"use_multiparameter_pipeline_model_parallel": True}
LENGTHS = {"variable_seq_lengths": True}
ADVANCE = {"recompute_in_advance": True}
BUBBLE = {"recompute_in_bubble": True}
SWAP = {"swap_attention": True}
NORM = {"recompute_norm": True}


def chosen(options, megatron):
    registered = registry()
    given = build(registered.options_class, options)
    return select(registered, given, Context(Spelling.FLAG, {"world_size": 1} | megatron))


@pytest.mark.parametrize(
    ("options", "megatron", "reason"),
    [
        (ZB, {}, "zb-h1 needs --pipeline-model-parallel-size 2 or more, not 1"),
        (ZB, PP | {"delay_wgrad_compute": True}, "--delay-wgrad-compute exclude"),
        (ZB, PP | {"use_megatron_fsdp": True}, "--use-megatron-fsdp exclude"),
        (ZB, PP | {"num_distributed_optimizer_instances": 2}, "instances 1, not 2"),
        (SEVERAL, {}, "needs --pipeline-model-parallel-size 2 or more, not 1"),
        (SEVERAL, PP | {"overlap_moe_expert_parallel_comm": True}, "exclude each other"),
        (
            LENGTHS,
            PP | {"num_experts": 2, "moe_token_dispatcher_type": "allgather"},
            "needs --moe-token-dispatcher-type alltoall, not allgather",
        ),
        (ADVANCE, BLOCK, "needs --pipeline-model-parallel-size 2 or more, not 1"),
        (ADVANCE, PP, "needs --recompute-granularity full --recompute-method block"),
        (ADVANCE, PP | BLOCK | {"recompute_method": "uniform"}, "--recompute-method block"),
        (ADVANCE, PP | BLOCK | {"distribute_saved_activations": True}, "exclude each other"),
        (BUBBLE, PP, "needs --num-layers-per-virtual-pipeline-stage"),
    ],
    ids=str,
)
def test_what_is_missing_is_one_line(options, megatron, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        chosen(options, megatron)
    assert str(error.value).startswith("--" + next(iter(options)).replace("_", "-"))
    assert "\n" not in str(error.value)


PAIRS = [
    (ZB, LENGTHS, PP, True),
    (ZB, NORM, PP, True),
    (ZB, SWAP, PP, True),
    (ZB, {}, PP | BLOCK, True),
    (ZB, SEVERAL, PP, True),
    (ZB, {}, VPP, False),
    (ZB, ADVANCE, PP | BLOCK, False),
    (ZB, BUBBLE, VPP, False),
    (SEVERAL, LENGTHS, PP, True),
    (SEVERAL, LENGTHS, VPP, True),
    (SEVERAL, ADVANCE, PP | BLOCK, True),
    (SEVERAL, BUBBLE, VPP, True),
    (ADVANCE, NORM, VPP | BLOCK, True),
    (ADVANCE, BUBBLE, VPP | BLOCK, False),
    (ADVANCE, {"swap_layer_input": True}, PP | BLOCK, False),
    (BUBBLE, {}, VPP | BLOCK, False),
    (BUBBLE, SWAP, VPP, False),
    (BUBBLE, LENGTHS, VPP, True),
]


@pytest.mark.parametrize(("one", "other", "megatron", "is_legal"), PAIRS, ids=str)
def test_pairs(one, other, megatron, is_legal):
    if is_legal:
        on = {choice.feature.enabled_by for choice in chosen(one | other, megatron) if choice.on}
        assert {*one, *other} <= on
        return
    with pytest.raises(ConfigError) as error:
        chosen(one | other, megatron)
    assert "\n" not in str(error.value)
