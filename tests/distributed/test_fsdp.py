"""Sharded training equals training in one process, for every option."""

import functools
from typing import Any

import pytest
import torch

from tests.distributed.fsdp_model import LAYERS, Outcome, Training, new_model, train, train_all
from tests.ranks import run_ranks

WRAP = {"sub_modules_to_wrap": ["embed", "layers.{*}", "head"]}
SHARD = {"sharding_size": "auto", **WRAP}
RECOMPUTE = {"recompute_modules": ["layers.{*}"]}
IGNORE = {"ignored_modules": ["image_encoder"]}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "sharded": (2, {"sharding_size": 2, **WRAP}),
    "one unit": (2, {"sharding_size": "auto"}),
    "replicated by default": (2, WRAP),
    "nested units": (2, {**SHARD, "sub_modules_to_wrap": ["layers.{*}", "layers.{0-1}.mlp.{0,2}"]}),
    "recomputed, reentrant": (2, {**SHARD, **RECOMPUTE}),
    "recomputed": (2, {**SHARD, **RECOMPUTE, "use_reentrant": False}),
    "recomputed around units": (
        2,
        {
            **SHARD,
            "sub_modules_to_wrap": ["layers.{*}.mlp"],
            "recompute_modules": ["layers.{1-2}", "layers.0.mlp"],
        },
    ),
    "ignored": (2, {**SHARD, **IGNORE}),
    "offloaded": (2, {**SHARD, "offload_to_cpu": True, "pin_memory": True}),
    "kept after forward": (2, {**SHARD, "reshard_after_forward": False}),
    "prefetched": (2, {**SHARD, "num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2}),
    "nothing prefetched": (2, {**SHARD, "num_to_backward_prefetch": 0}),
    "fp32 given": (2, {**SHARD, "param_dtype": "fp32", "reduce_dtype": "fp32"}),
    "hsdp": (4, {"sharding_size": 2, **WRAP}),
    "resharded to two": (4, {**SHARD, "reshard_after_forward": 2}),
    "all at once": (
        4,
        {
            **{"sharding_size": 2, "offload_to_cpu": True, "num_to_forward_prefetch": 1},
            **{**WRAP, **RECOMPUTE, **IGNORE},
        },
    ),
}


@functools.cache
def single_process() -> Training:
    return train(new_model())


@functools.cache
def sharded(world: int) -> list[dict[str, Outcome]]:
    cases = {name: values for name, (ranks, values) in CASES.items() if ranks == world}
    return run_ranks(train_all, world, cases, timeout=300)


@pytest.mark.parametrize("case", CASES)
def test_sharded_training_equals_one_process(case):
    expected = single_process()
    assert expected.losses[-1] < expected.losses[0]
    for rank, outcomes in enumerate(sharded(CASES[case][0])):
        training, shards = outcomes[case].training, outcomes[case].shards
        assert training.losses == pytest.approx(expected.losses, abs=1e-6)
        for ours, whole in zip(training.gradients, expected.gradients, strict=True):
            theirs = {
                name: local_rows(tensor, rank % shards, shards) for name, tensor in whole.items()
            }
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def local_rows(tensor: torch.Tensor, rank: int, shards: int) -> torch.Tensor:
    """Return the rows of one rank; the last ranks may get fewer, or none."""
    rows = -(-len(tensor) // shards)
    return tensor[rank * rows : (rank + 1) * rows]


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_the_planned_bytes(case):
    for rank in sharded(CASES[case][0]):
        assert rank[case].planned == rank[case].held


def test_shards_are_halves_and_ignored_modules_are_replicated():
    model = new_model()
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    encoder = sum(p.numel() * p.element_size() for p in model.image_encoder.parameters())
    halves, ignoring = (sharded(2)[0][case].held for case in ("sharded", "ignored"))
    padding = 4 * 64 * LAYERS
    assert whole / 2 <= halves < whole / 2 + padding
    assert halves + encoder / 2 - padding < ignoring <= halves + encoder / 2
    assert sharded(2)[0]["replicated by default"].held == whole
