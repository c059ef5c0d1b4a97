"""What inference shares with training, and what it takes from its scripts and leaves aside."""

import argparse
import shlex

import pytest

from mindspeed.config import add_options, read_options
from mindspeed_llm.evaluation.options import EvaluateOptions
from mindspeed_llm.generation.options import GenerateOptions, as_training

MODEL = "--load m --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
TRAINING = (
    "--moe-grouped-gemm --moe-token-dispatcher-type allgather --moe-aux-loss-coeff 0.001 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 0.001 --seq-length 8"
)


@pytest.mark.parametrize("kind", [GenerateOptions, EvaluateOptions])
def test_flags_of_a_training_of_experts_change_nothing(kind):
    parser = argparse.ArgumentParser()
    add_options(parser, kind)
    alone, beside = (
        as_training(read_options(parser.parse_args(shlex.split(flags)), kind))
        for flags in (MODEL, f"{MODEL} {TRAINING}")
    )
    assert beside == alone
    assert alone.expert_tensor_parallel_size == 1 and alone.tensor_model_parallel_size == 2
