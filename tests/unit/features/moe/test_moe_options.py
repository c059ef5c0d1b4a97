"""Switches of dispatchers, shared experts and load-aware recompute: what they set and refuse."""

import subprocess
import sys

import pytest

import mindspeed.megatron_adaptor  # noqa: F401  # before Megatron, as in a user's script
from mindspeed.config import ConfigError, Spelling
from mindspeed.features.activation import Activation
from mindspeed.features.base import Context
from mindspeed.features.moe.adaptive_recompute import MoeAdaptiveRecompute
from mindspeed.features.moe.bmm_mc2 import MoeBmmMc2
from mindspeed.features.moe.fix_router import FixRouter
from mindspeed.features.moe.fused_experts import MoeFusedExperts
from mindspeed.features.moe.permutation_async_comm import MoePermutationAsyncComm
from mindspeed.features.moe.router_fusion import MoeRouterFusion
from mindspeed.features.moe.shared_experts import SharedExperts
from mindspeed.features.moe.tp_extend_ep import MoeTpExtendEp, extended
from mindspeed.features.registry import Registry

ASYNC = (MoePermutationAsyncComm, {"moe_permutation_async_comm": True})
EXTEND = (MoeTpExtendEp, {"moe_tp_extend_ep": True})
SHARED = (SharedExperts, {"n_shared_experts": 2})
BMM = (MoeBmmMc2, {"moe_bmm_mc2": True})
BMM_ARGUMENTS = {
    "moe_grouped_gemm": True,
    "moe_pad_expert_input_to_capacity": True,
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
}
FUSED = (MoeFusedExperts, {"moe_fused_experts": True})
GROUPED = {"moe_grouped_gemm": True, "swiglu": True, "add_bias_linear": False}
FIX = (FixRouter, {"fix_router": True})
RECOMPUTE = (MoeAdaptiveRecompute, {"moe_adaptive_recompute_activation": True})
TP2_EP2 = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}


def test_a_fused_router_refuses_the_replay_that_megatron_would_ignore():
    context = Context(Spelling.FLAG, {"moe_router_fusion": True, "num_experts": 8})
    assert MoeRouterFusion().is_on(None, context)
    MoeRouterFusion().check(None, context)
    replayed = Context(Spelling.FLAG, {"moe_enable_routing_replay": True})
    with pytest.raises(ConfigError, match="choices of --moe-enable-routing-replay: drop one"):
        MoeRouterFusion().check(None, replayed)


def check(feature, arguments):
    kind, options = feature
    context = Context(Spelling.FLAG, {"num_experts": 8, **arguments})
    kind().check(kind.Options(**options), context)


@pytest.mark.parametrize(
    ("feature", "arguments", "said"),
    [
        (ASYNC, {"moe_token_dispatcher_type": "flex"}, "allgather and alltoall, not flex"),
        (ASYNC, {"moe_token_dispatcher_type": "alltoall_seq"}, "not alltoall_seq: choose one"),
        (ASYNC, {"overlap_moe_expert_parallel_comm": True}, "cannot be used together"),
        (EXTEND, TP2_EP2 | {"num_experts": 6}, "6 experts over 2 x 2 ranks"),
        (EXTEND, TP2_EP2 | {"expert_tensor_parallel_size": 1}, "--expert-tensor-parallel-size 1"),
        (EXTEND, {"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor"),
        (SHARED, {"moe_ffn_hidden_size": 8, "moe_shared_expert_intermediate_size": 8}, "give 16"),
        (BMM, BMM_ARGUMENTS | {"moe_grouped_gemm": False}, "needs --moe-grouped-gemm"),
        (BMM, BMM_ARGUMENTS | {"moe_pad_expert_input_to_capacity": False}, "pad-expert-input"),
        (BMM, BMM_ARGUMENTS | {"moe_token_dispatcher_type": "allgather"}, "not allgather"),
        (BMM, BMM_ARGUMENTS | {"expert_model_parallel_size": 1}, "sizes above 1"),
        (BMM, BMM_ARGUMENTS | {"moe_shared_expert_overlap": True}, "exclude each other"),
        (BMM, BMM_ARGUMENTS | {"moe_apply_probs_on_input": True}, "--moe-apply-probs-on-input"),
        (BMM, BMM_ARGUMENTS | {"fp8": "hybrid"}, "--fp8-format exclude each other"),
        (BMM, BMM_ARGUMENTS | {"fp4": "e2m1"}, "--fp4-format exclude each other"),
        (FUSED, GROUPED | {"moe_grouped_gemm": False}, "needs --moe-grouped-gemm"),
        (RECOMPUTE, {"recompute_granularity": "full"}, "no effect under"),
        (RECOMPUTE, {"overlap_moe_expert_parallel_comm": True}, "none is recomputed as a whole"),
        (
            RECOMPUTE,
            {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
            "exclude each other",
        ),
    ],
)
def test_what_cannot_work_is_refused(feature, arguments, said):
    with pytest.raises(ConfigError, match=said):
        check(feature, arguments)


@pytest.mark.parametrize(
    ("feature", "arguments"),
    [
        (ASYNC, {"moe_token_dispatcher_type": "allgather"}),
        (EXTEND, TP2_EP2 | {"expert_tensor_parallel_size": 2}),
        (SHARED, {"moe_ffn_hidden_size": 8, "moe_shared_expert_intermediate_size": 16}),
        (BMM, BMM_ARGUMENTS),
        (FUSED, GROUPED | {"offload_modules": ["core_attn"]}),
        (FUSED, {"moe_grouped_gemm": True}),
        (RECOMPUTE, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}),
    ],
)
def test_what_works_is_accepted(feature, arguments):
    check(feature, arguments)


@pytest.mark.parametrize("feature", [ASYNC, EXTEND, SHARED, BMM, RECOMPUTE, FIX])
def test_a_dense_model_is_refused(feature):
    with pytest.raises(ConfigError, match="is for layers of experts, and this model has none"):
        check(feature, BMM_ARGUMENTS | {"num_experts": None})
    check(feature, BMM_ARGUMENTS)


def test_tp_extend_ep_sets_the_sizes_once():
    assert extended(2, 3, None) == (6, 1)
    assert extended(2, 3, 2) == (6, 1)
    assert extended(2, *extended(2, 3, None)) == (6, 1)


def test_n_shared_experts_sets_the_width():
    from megatron.core.transformer import TransformerConfig

    kind, options = SHARED
    activation = Activation(Registry([kind()]))
    activation.activate(activation.registry.options_class(**options))
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 12}
    moe = {"num_moe_experts": 4, "add_bias_linear": False}
    try:
        assert TransformerConfig(**sizes).moe_shared_expert_intermediate_size is None
        assert TransformerConfig(**sizes, **moe).moe_shared_expert_intermediate_size == 24
        config = TransformerConfig(**sizes, **moe, moe_ffn_hidden_size=5)
        assert config.moe_shared_expert_intermediate_size == 10
        with pytest.raises(ConfigError, match="a width of 24"):
            TransformerConfig(**sizes, **moe, moe_shared_expert_intermediate_size=7)
    finally:
        activation.deactivate()


@pytest.mark.parametrize(
    "options",
    [
        {"moe_bmm_mc2": True},
        {
            "moe_permutation_async_comm": True,
            "moe_tp_extend_ep": True,
            "moe_fused_experts": True,
            "moe_adaptive_recompute_activation": True,
            "fix_router": True,
            "n_shared_experts": 1,
        },
    ],
    ids=["bmm", "others"],
)
def test_patches_find_megatron_when_it_is_imported_after_them(options):
    # As in a command. In tests Megatron is there already, and what imports it in a circle passes.
    script = (
        "import sys, mindspeed.megatron_adaptor, mindspeed\n"
        "assert 'megatron.core' not in sys.modules\n"
        f"mindspeed.enable(**{options})\n"
        "import megatron.core.transformer.moe.moe_layer\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_the_share_of_an_overloaded_expert_is_a_finite_number(scale):
    with pytest.raises(ValueError, match="a finite number|greater than 0"):
        MoeAdaptiveRecompute.Options(moe_adaptive_recompute_activation_scale=scale)
