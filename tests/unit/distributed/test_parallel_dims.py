"""Parallel sizes that do not fit together raise an error that names flag, value and remedy."""

import re

import pytest

from mindspeed.config import ConfigError
from mindspeed.distributed.parallel_dims import (
    ParallelDims,
    check_divides,
    check_model,
    divide_batch,
    virtual_stages,
)

VALID = [
    ({}, {}),
    ({"world": 8, "tp": 2, "pp": 2}, {}),
    ({"world": 2, "tp": 2}, {"num_attention_heads": 4, "num_layers": 3}),
    ({"world": 8, "tp": 2, "cp": 4}, {}),
    ({"world": 4, "tp": 2, "ep": 2}, {"num_experts": 8, "num_query_groups": 2}),
    ({"world": 4, "tp": 2, "ep": 4, "etp": 1}, {}),
    ({"world": 4, "ep": 4}, {"num_experts": 4}),
    ({"world": 4}, {"num_experts": 0}),
]
INVALID = [
    ({"world": 3, "tp": 2}, "3 rank.*multiple of 2"),
    ({"world": 3, "cp": 2}, "3 rank.*--context-parallel-size 2 = 2 ranks"),
    (
        {"world": 4, "tp": 2, "cp": 4},
        "--tensor-model-parallel-size 2 x --context-parallel-size 4 = 8 ranks",
    ),
    (
        {"world": 2, "tp": 2, "ep": 2},
        "--expert-tensor-parallel-size 2 x --expert-model-parallel-size 2 = 4 ranks a set of",
    ),
    ({"world": 2, "etp": 4}, "--expert-tensor-parallel-size 4 = 4 ranks a set of experts"),
    ({"tp": 0}, "--tensor-model-parallel-size 0 is too small"),
    ({"cp": 0}, "--context-parallel-size 0 is too small"),
    ({"ep": -1}, "--expert-model-parallel-size -1 is too small"),
    (
        {"world": 2, "pp": 2, "vpp": 2, "global_batch_size": 3},
        "the 3 micro-batches of a step are not a multiple of --pipeline-model-parallel-size 2: "
        "use a --global-batch-size that is a multiple of 2$",
    ),
]
INVALID_FOR_MODEL = [
    (
        {"world": 3, "tp": 3},
        {"num_attention_heads": 4},
        "--tensor-model-parallel-size 3 does not divide --num-attention-heads 4: "
        "use 1, or another number of ranks with 2 or 4$",
    ),
    (
        {"world": 2, "pp": 2},
        {"num_layers": 3},
        "--pipeline-model-parallel-size 2 does not divide --num-layers 3: "
        "use 1, or another number of ranks with 3$",
    ),
    ({"world": 2, "tp": 2}, {"num_query_groups": 3}, "does not divide --num-query-groups 3"),
    ({"world": 2, "tp": 2}, {"ffn_hidden_size": 31}, "does not divide --ffn-hidden-size 31"),
    (
        {"world": 3, "ep": 3},
        {"num_experts": 8},
        "--expert-model-parallel-size 3 does not divide --num-experts 8: "
        "use 1, or another number of ranks with 2, 4 or 8$",
    ),
    ({"world": 2, "ep": 2}, {"num_experts": 0}, "the model has no experts: use 1$"),
    (
        {"world": 2},
        {"num_experts": 0, "etp": 2},
        "--expert-tensor-parallel-size 2: the model has no experts: use 1$",
    ),
    (
        {"world": 2},
        {"num_experts": 4, "etp": 2, "moe_ffn_hidden_size": 31},
        "--expert-tensor-parallel-size 2 does not divide --moe-ffn-hidden-size 31: use 1",
    ),
]


@pytest.mark.parametrize("sizes, model", VALID, ids=str)
def test_valid_sizes_pass(sizes, model):
    dims = ParallelDims(**sizes)
    check_model(world=dims.world, tp=dims.tp, pp=dims.pp, cp=dims.cp, ep=dims.ep, **model)


@pytest.mark.parametrize("sizes, message", INVALID, ids=str)
def test_invalid_sizes_name_what_is_allowed(sizes, message):
    with pytest.raises(ConfigError, match=message):
        ParallelDims(**sizes)


@pytest.mark.parametrize("sizes, model, message", INVALID_FOR_MODEL, ids=str)
def test_sizes_must_divide_those_of_the_model(sizes, model, message):
    with pytest.raises(ConfigError, match=message):
        check_model(**sizes, **model)


@pytest.mark.parametrize("world", [1, 3, 4, 6, 8])
@pytest.mark.parametrize("size", [3, 4, 6])
def test_advised_sizes_work(world, size):
    model = {"num_attention_heads": 12, "num_query_groups": 2, "ffn_hidden_size": 36}
    with pytest.raises(ConfigError) as error:
        check_model(world=world, tp=size, **model)
    now, _, later = str(error.value).partition(": use ")[2].partition("another number of ranks")
    assert set(re.findall(r"\d+", now + later)) == {"1", "2"}
    for advised in map(int, re.findall(r"\d+", now)):
        check_model(world=world, tp=advised, **model)
        ParallelDims(world=world, tp=advised)
    for advised in map(int, re.findall(r"\d+", later)):
        check_model(world=advised, tp=advised, **model)
        ParallelDims(world=advised, tp=advised)


def test_derived_sizes():
    dims = ParallelDims(world=16, tp=2, pp=2, cp=2, micro_batch_size=3, global_batch_size=24)
    assert (dims.dp, dims.expert_tp, dims.num_micro_batches) == (2, 2, 4)
    assert ParallelDims(world=4, tp=2, etp=1).expert_tp == 1
    assert ParallelDims(world=4, micro_batch_size=3).global_batch_size == 12


def test_dp_rank_is_that_of_megatron():
    ranks = [ParallelDims(world=16, rank=rank, tp=2, pp=2, cp=2).dp_rank for rank in range(16)]
    assert ranks == [0, 0, 0, 0, 1, 1, 1, 1] * 2


def test_a_batch_is_divided_evenly_or_rejected():
    assert ParallelDims(world=3, micro_batch_size=2).num_micro_batches == 1
    assert divide_batch(24, 2, 3) == 4
    for batch in (3, 10, 25):
        with pytest.raises(
            ConfigError, match=f"--global-batch-size {batch} is not a multiple of 6"
        ):
            divide_batch(batch, 2, 3)


def test_a_step_has_a_limited_number_of_micro_batches():
    sizes = {"world": 3, "micro_batch_size": 2}
    dims = ParallelDims(**sizes, global_batch_size=6 * 10**5)
    assert dims.num_micro_batches == 10**5
    with pytest.raises(ConfigError, match="use at most 600000$"):
        ParallelDims(**sizes, global_batch_size=6 * 10**5 + 6)


def test_virtual_stages():
    assert virtual_stages(8, 2, 1) == 4
    assert virtual_stages(8, 2, 4) is None, "one stage a rank is no virtual stage"
    assert virtual_stages(8, 1, 2) is None and virtual_stages(8, 2, None) is None
    for size in (3, 0):
        with pytest.raises(ConfigError, match=f"-stage {size} does not divide the 4 layers of"):
            virtual_stages(8, 2, size)
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-size 3 does not divide"):
        virtual_stages(8, 3, 1)


def test_many_divisors_are_not_listed():
    with pytest.raises(ConfigError, match="--size 7 does not divide the 4096 columns: use a div"):
        check_divides("--size", 7, 4096, "the 4096 columns")
    with pytest.raises(ConfigError, match="the 9 layers: use 1, 3 or 9 or give a list$"):
        check_divides("--size", 2, 9, "the 9 layers", "or give a list")
