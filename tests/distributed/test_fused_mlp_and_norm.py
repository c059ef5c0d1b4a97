"""Fused SwiGLU and RMSNorm give Megatron's own numbers in a whole model."""

import pytest
import torch

import mindspeed
from tests.distributed.one_step import step
from tests.ranks import run_ranks


def build(bias, sequence_parallel=False, ranks=1):
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        add_bias_linear=bias,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(config, spec, vocab_size=32, max_sequence_length=8)


def norms(model):
    return {type(layer.input_layernorm).__name__ for layer in model.decoder.layers}


def compare(bias, sequence_parallel=False, ranks=1):
    plain = build(bias, sequence_parallel, ranks)
    expected = step(plain)
    mindspeed.enable(use_fused_swiglu=True, use_fused_rmsnorm=True)
    assert {"fused_swiglu", "fused_rmsnorm"} <= set(mindspeed.report().on)
    fused = build(bias, sequence_parallel, ranks)
    fused.load_state_dict(plain.state_dict())
    for found, wanted in zip(step(fused), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-7)
    assert norms(plain) != norms(fused) == {"FusedRMSNorm"}
    marks = {
        getattr(parameter, "sequence_parallel", False)
        for parameter in fused.decoder.layers[0].input_layernorm.parameters()
    }
    assert marks == {sequence_parallel}
    mindspeed.enable()
    assert norms(build(bias, sequence_parallel, ranks)) == norms(plain)


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_model_with_fused_operators(bias):
    run_ranks(compare, 1, bias)


def test_sequence_parallel():
    run_ranks(compare, 2, False, True, 2)
