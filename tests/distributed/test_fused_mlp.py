"""MLPs of a GPT that recompute SwiGLU train as those that keep it."""

import pytest
import torch

import mindspeed
from tests.ranks import run_ranks

SWIGLU = {
    "bias_activation_fusion": True,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
}
CASES = {
    "dense": SWIGLU,
    "shared experts": SWIGLU
    | {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 40,
    },
    "recomputed": SWIGLU | {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
}
WIDTHS = {"dense": 56, "shared experts": 40, "recomputed": 56}


def _compare(name):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from tests.distributed.te_model import SEQUENCE, VOCAB, gradients, step

    parallel_state.initialize_model_parallel()
    results = []
    for is_on in (False, True):
        mindspeed.enable(use_fused_swiglu=is_on)
        torch.manual_seed(3)
        model_parallel_cuda_manual_seed(3)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            ffn_hidden_size=56,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            masked_softmax_fusion=False,
            **CASES[name],
        )
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False
        )
        model = GPTModel(config, spec, VOCAB, SEQUENCE)
        widths = set()

        def keep(tensor, widths=widths):
            widths.add(tensor.shape[-1] if tensor.dim() == 3 else None)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses = step(model)
        results.append((losses, gradients(model), widths))
    return results


@pytest.mark.parametrize("name", CASES)
def test_same_losses_and_gradients_without_the_activation(name):
    (losses, grads, widths), (same, others, fused_widths) = run_ranks(_compare, 1, name)[0]
    torch.testing.assert_close(same, losses, rtol=1e-6, atol=1e-6)
    for parameter, gradient in grads.items():
        torch.testing.assert_close(others[parameter], gradient, rtol=2e-5, atol=1e-6, msg=parameter)
    assert WIDTHS[name] in widths
    assert WIDTHS[name] not in fused_widths
