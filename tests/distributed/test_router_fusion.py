"""Megatron's router with --moe-router-fusion, which calls mindspeed.te, against its torch code."""

import dataclasses

import pytest
import torch

from tests.ranks import run_ranks

SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5}
BIASED = SIGMOID | {"moe_router_enable_expert_bias": True}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
LOSSES = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2}
CASES = {
    "softmax": LOSSES,
    "softmax of all, in groups": LOSSES | GROUPS | {"moe_router_pre_softmax": True},
    "sigmoid": LOSSES | SIGMOID,
    "biased, in groups": LOSSES | BIASED | GROUPS,
    "loss of a sequence": LOSSES | BIASED | {"moe_router_load_balancing_type": "seq_aux_loss"},
    "loss of a batch": LOSSES | {"moe_router_load_balancing_type": "global_aux_loss"},
    "several losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.3, 0.1],
    },
    "loss of each token": LOSSES | {"calculate_per_token_loss": True},
    "capacity": LOSSES | {"moe_expert_capacity_factor": 0.5},
}
EXPERTS, HIDDEN = 8, 6


def route(options, is_fused):
    """Return what one pass of a router leaves: outputs, gradients, losses, counts."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        use_cpu_initialization=True,
        **{"moe_router_topk": 4, "moe_router_dtype": "fp32", "add_bias_linear": False} | options,
        moe_router_fusion=is_fused,
    )
    tracked = moe_utils.get_moe_layer_wise_logging_tracker()
    tracked.clear()
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    try:
        groups = moe_utils.get_default_pg_collection()
    except AttributeError:  # 0.14 has another name
        groups = moe_utils.get_default_model_comm_pgs()
    router = TopKRouter(config, groups)
    router.set_layer_number(1)
    weight = torch.Generator().manual_seed(9)
    router.weight.data.copy_(torch.randn(EXPERTS, HIDDEN, generator=weight))
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(-0.3, 0.3, EXPERTS))
    x = torch.randn(10, 3, HIDDEN, generator=generator, requires_grad=True)
    probs, chosen = router(x)
    (probs * torch.randn(probs.shape, generator=generator)).sum().backward()
    losses = {name: entry["values"] for name, entry in sorted(tracked.items())}
    counts = router.local_tokens_per_expert
    return [probs.detach(), chosen, x.grad, router.weight.grad, counts, losses]


def both_ways():
    """Return the results of every case, fused and not; None where there is no switch."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    if "moe_router_fusion" not in {field.name for field in dataclasses.fields(TransformerConfig)}:
        return None
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    return {
        name: [route(options, is_fused) for is_fused in (True, False)]
        for name, options in CASES.items()
    }


def test_values_gradients_and_losses_equal_megatrons_own():
    for rank in run_ranks(both_ways, 2):
        if rank is None:
            pytest.skip("this megatron-core has no moe_router_fusion")
        for name, (fused, plain) in rank.items():
            probs, chosen, *_, losses = plain
            assert torch.equal(fused[1], chosen), name
            assert losses and fused[-1].keys() == losses.keys()
            for got, want in zip(fused[:-1], plain[:-1], strict=True):
                torch.testing.assert_close(
                    got, want, rtol=1e-5, atol=1e-6, msg=f"{name}: {{}}".format
                )
            for kind, value in losses.items():
                assert value.abs().sum() > 0
                torch.testing.assert_close(fused[-1][kind], value, rtol=1e-6, atol=1e-7)
