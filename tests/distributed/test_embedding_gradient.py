"""The gradient of an embedding, by rows, is that of Megatron, tied or not."""

from dataclasses import replace

import pytest
import torch

import mindspeed
from tests.gpt.layout import Layout
from tests.ranks import run_ranks

TIED = Layout(num_layers=2, spec="te")
UNTIED = Layout("llama", num_layers=2, spec="te")


def _train(layout, is_on, fuses=True):
    from mindspeed.parallel.tensor import embedding
    from tests.gpt import training as gpt

    def fused(layout, plain=gpt.transformer_config):
        config = plain(layout)
        config.gradient_accumulation_fusion = fuses
        return config

    gpt.transformer_config = fused
    mindspeed.enable(fuse_embedding_gradient=is_on)
    calls, backward = [], embedding._Lookup.backward
    embedding._Lookup.backward = staticmethod(lambda *given: calls.append(1) or backward(*given))
    training = gpt.Training(layout)
    losses = [training.step()[0] for _ in range(2)]
    return losses, training.gradients(), len(calls)


@pytest.mark.parametrize(
    ("layout", "times"),
    [
        (TIED, 1),
        (UNTIED, 1),
        (replace(TIED, dp=2, overlap_grad_reduce=True, bucket_size=2000), 1),
        (replace(TIED, pp=2), 0.5),
        (replace(UNTIED, pp=2), 0.5),
        (replace(TIED, tp=2), 0),  # a split vocabulary stays Megatron's
        (replace(TIED, recompute=("full", "uniform", 1)), 1),
    ],
    ids=str,
)
def test_same_losses_and_gradients(layout, times):
    plain, ours = (run_ranks(_train, layout.world, layout, is_on) for is_on in (False, True))
    assert sum(calls for *_, calls in plain) == 0
    steps = 2 * layout.micro_batches * layout.world
    assert sum(calls for *_, calls in ours) == steps * times
    for (losses, gradients, _), (same, others, _) in zip(plain, ours, strict=True):
        torch.testing.assert_close(same, losses, rtol=1e-6, atol=1e-6)
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_gradients_that_are_not_fused_stay_megatrons():
    (plain,), (ours,) = (run_ranks(_train, 1, TIED, is_on, False) for is_on in (False, True))
    assert ours[2] == 0
    torch.testing.assert_close(ours[:2], plain[:2], rtol=0, atol=0)


def _eager(_):
    """Look up without gradients, without main_grad, and with gradients that are not fused."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import VocabParallelEmbedding
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    mindspeed.enable(fuse_embedding_gradient=True)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    found = []
    for fuses in (True, False):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=4,
            num_attention_heads=1,
            gradient_accumulation_fusion=fuses,
        )
        layer = VocabParallelEmbedding(8, 4, init_method=torch.nn.init.ones_, config=config)
        ids = torch.tensor([[1, 1, 3]])
        layer(ids).sum().backward()
        found.append(layer.weight.grad[:, 0].tolist())
        with torch.no_grad():
            found.append(layer(ids).sum().item())
    return found


def test_without_main_grad_it_is_megatrons():
    (found,) = run_ranks(_eager, 1, None)
    assert found == [[0, 2, 0, 1, 0, 0, 0, 0], 12] * 2
