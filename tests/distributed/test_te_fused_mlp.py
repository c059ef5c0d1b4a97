"""Megatron's MLP from operations (--use-transformer-engine-op-fuser) against its usual MLP."""

import inspect

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from mindspeed.compat import megatron
from tests.distributed.te_model import build, gradients, step
from tests.ranks import run_ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def has_op_fuser():
    from megatron.core.models.gpt import gpt_layer_specs

    maker = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
    return "use_te_op_fuser" in inspect.signature(maker).parameters


def fused_equals_usual(shape, sequence_parallel):
    options = {"tp": dist.get_world_size(), "sequence_parallel": sequence_parallel}
    usual = build("te", shape, **options)
    fused = build("te fused", shape, **options)
    fused.load_state_dict(usual.state_dict())
    torch.testing.assert_close(step(fused), step(usual), **CLOSE)
    expected = gradients(usual)
    assert type(fused.decoder.layers[0].mlp).__name__ == "TEFusedMLP"
    for name, grad in gradients(fused).items():
        torch.testing.assert_close(grad, expected[name], **CLOSE, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("world, sequence_parallel", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_fused_mlp_equals_the_usual_one(shape, world, sequence_parallel):
    if not has_op_fuser():
        pytest.skip("megatron-core 0.12 builds no MLP from operations")
    if megatron.version() < Version("0.15"):
        pytest.skip("megatron-core 0.14 builds it from te.ops.Linear, which mindspeed.te has not")
    run_ranks(fused_equals_usual, world, shape, sequence_parallel)
