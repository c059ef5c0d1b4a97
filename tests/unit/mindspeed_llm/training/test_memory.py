"""The advice for a run without memory: nothing that the same run would refuse."""

import pytest

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed_llm.models.config import MoEConfig
from mindspeed_llm.training.memory import accepts
from mindspeed_llm.training.options import TrainOptions
from mindspeed_llm.training.setup import Setup, parallel_dims
from tests.unit.mindspeed_llm.training.shapes import DENSE

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BF16 = {"bf16": True, "fp16": False}
MOE = MoEConfig(num_experts=4, topk=2, ffn_hidden_size=8, is_moe_layer=(True,) * 4)
EXPERTS = DENSE.model_copy(update={"moe": MOE})


@pytest.mark.parametrize(
    ("given", "changes", "shape"),
    [
        ({}, {"tiled_mlp_size": 4}, EXPERTS),
        ({"recompute_norm": True}, FULL, DENSE),
        ({"recompute_granularity": "selective"}, {"swap_attention": True}, DENSE),
        ({"recompute_activation_function": True}, {"tiled_mlp_size": 4}, DENSE),
        ({"bf16": False, "fp16": True}, {"swap_optimizer": True}, DENSE),
        ({"bf16": False, "fp16": True}, {"reuse_fp32_param": True}, DENSE),
    ],
    ids=str,
)
def test_what_the_run_would_refuse_is_not_accepted(given, changes, shape):
    assert not accepts(_setup(given, shape), changes)
    assert accepts(_setup({}, DENSE), changes)


def test_tiled_loss_needs_a_vocabulary_without_padding():
    for multiple, is_accepted in ((1, True), (128, False)):
        given = {"make_vocab_size_divisible_by": multiple, "linear_cross_entropy": True}
        assert accepts(_setup(given, DENSE), {"tiled_loss_size": 4}) is is_accepted
    predicts_more = DENSE.model_copy(update={"mtp_num_layers": 1})
    given = {"make_vocab_size_divisible_by": 1, "linear_cross_entropy": True}
    assert not accepts(_setup(given, predicts_more), {"tiled_loss_size": 4})


def _setup(given, shape):
    options = TrainOptions(seq_length=16, **BF16 | given)
    return Setup(options, shape, None, parallel_dims(options, shape), 99, None, None, None)
