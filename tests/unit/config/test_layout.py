"""A layout that cannot be built is refused in the words of the flags."""

import pytest

from mindspeed.config import ConfigError, check_layout

GOOD = [
    {},
    {"world_size": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"world_size": 2, "tensor_model_parallel_size": 2, "num_attention_heads": 4, "num_layers": 3},
    {"world_size": 4, "tensor_model_parallel_size": 4, "num_query_groups": 2},
    {"world_size": 8, "tensor_model_parallel_size": 2, "context_parallel_size": 4},
]
BAD = [
    ({"world_size": 3, "tensor_model_parallel_size": 2}, "3 rank.*multiple of 2"),
    ({"world_size": 3, "context_parallel_size": 2}, "3 rank.*--context-parallel-size 2 = 2 ranks"),
    (
        {"world_size": 4, "tensor_model_parallel_size": 2, "context_parallel_size": 4},
        "--tensor-model-parallel-size 2 x --context-parallel-size 4 = 8 ranks",
    ),
    (
        {"world_size": 3, "tensor_model_parallel_size": 3, "num_attention_heads": 4},
        "--tensor-model-parallel-size 3 does not divide --num-attention-heads 4: use 1, 2, 4",
    ),
    (
        {"world_size": 2, "pipeline_model_parallel_size": 2, "num_layers": 3},
        "--pipeline-model-parallel-size 2 does not divide --num-layers 3: use 1, 3",
    ),
    (
        {"world_size": 2, "tensor_model_parallel_size": 2, "num_query_groups": 3},
        "does not divide --num-query-groups 3",
    ),
    ({"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size 0 is too small"),
]


@pytest.mark.parametrize("sizes", GOOD, ids=str)
def test_good_layouts_pass(sizes):
    check_layout(**sizes)


@pytest.mark.parametrize("sizes, message", BAD, ids=str)
def test_bad_layouts_say_what_is_allowed(sizes, message):
    with pytest.raises(ConfigError, match=message):
        check_layout(**sizes)
