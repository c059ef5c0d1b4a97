"""gradient_accumulation_fusion in Megatron's own linear layers, served by the stand-in."""

import pytest
import torch

from tests.ranks import run_ranks

S, B, IN, OUT = 6, 2, 8, 12


def weight_gradients(dtype, sequence_parallel):
    """Return the sum of two micro-batches' weight gradients: accumulated, and from autograd."""
    import fused_weight_gradient_mlp_cuda
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from mindspeed.compat.stand_ins import fused_weight_gradient_mlp_cuda as ours

    assert fused_weight_gradient_mlp_cuda is ours
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    results = []
    for fused in (True, False):
        model_parallel_cuda_manual_seed(3)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=IN,
            num_attention_heads=2,
            params_dtype=dtype,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
            gradient_accumulation_fusion=fused,
        )
        layer = ColumnParallelLinear(
            IN, OUT, config=config, init_method=torch.nn.init.normal_, bias=False
        )
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
        generator = torch.Generator().manual_seed(5)
        for _ in range(2):
            x = torch.randn(S, B, IN, generator=generator).to(dtype)
            out, _ = layer(x)
            out.backward(torch.randn(out.shape, generator=generator).to(dtype))
        results.append(layer.weight.main_grad if fused else layer.weight.grad)
    return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_accumulated_gradients_equal_autograds(dtype, rtol, sequence_parallel):
    for accumulated, autograds in run_ranks(weight_gradients, 2, dtype, sequence_parallel):
        assert accumulated.dtype == torch.float32 and accumulated.abs().sum() > 0
        torch.testing.assert_close(accumulated, autograds.float(), rtol=rtol, atol=rtol)
