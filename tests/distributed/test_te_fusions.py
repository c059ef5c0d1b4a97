"""Megatron's fusion switches lead into mindspeed.te and change no number of a whole model."""

import dataclasses

import pytest
import torch

from tests.distributed.te_model import build, gradients, step
from tests.ranks import run_ranks

ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
CASES = {
    "rotary embedding": ("llama", {"apply_rope_fusion": True}),
    "cross entropy": (
        "gpt2",
        {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
    ),
    "permutation, all-gather": ("experts", {"moe_permute_fusion": True}),
    "permutation, all-to-all": ("experts", {"moe_permute_fusion": True} | ALLTOALL),
    "router": ("experts", {"moe_router_fusion": True, "moe_aux_loss_coeff": 0.1}),
}


def fused_and_plain(shape, fusion, ranks):
    """Return losses and gradients with and without the switches; None where they do not exist."""
    from megatron.core.transformer import TransformerConfig

    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    if not fusion.keys() <= known:
        return None
    common = {name: value for name, value in fusion.items() if not name.endswith("fusion")}
    results = []
    for options in (fusion, common):
        model = build("te", shape, **ranks, **options)
        losses = step(model)
        results.append((losses, gradients(model)))
    return results


def check(world, shape, fusion, ranks):
    for result in run_ranks(fused_and_plain, world, shape, fusion, ranks):
        if result is None:
            pytest.skip(f"this megatron-core has no {next(iter(fusion))}")
        (fused, fused_grads), (plain, plain_grads) = result
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
        assert fused_grads.keys() == plain_grads.keys()
        for name, grad in plain_grads.items():
            torch.testing.assert_close(
                fused_grads[name], grad, rtol=1e-4, atol=1e-6, msg=f"{name}: {{}}".format
            )


@pytest.mark.parametrize("case", CASES)
def test_on_one_rank(case):
    check(1, *CASES[case], {})


def test_cross_entropy_over_tensor_parallel_ranks():
    check(2, *CASES["cross entropy"], {"tp": 2})


def test_permutation_over_expert_parallel_ranks():
    check(2, *CASES["permutation, all-gather"], {"ep": 2})
