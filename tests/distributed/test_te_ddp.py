"""mindspeed.te under Megatron's data parallelism: fused and delayed weight gradients, two ranks."""

import inspect

import pytest
import torch
import torch.distributed as dist

from mindspeed.te.pytorch import Linear
from tests.distributed.te_model import build, step
from tests.ranks import run_ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def wrap(config, model, **options):
    """Wrap a model as Megatron does, in buckets small enough to have several."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(bucket_size=1000, **options)
    wrapped = DistributedDataParallel(config, ddp_config, model)
    wrapped.zero_grad_buffer()
    return wrapped


def main_grads(fusion, overlap):
    """Run two microbatches, the first one without synchronisation."""
    model = build("te", "llama", gradient_accumulation_fusion=fusion)
    wrapped = wrap(model.config, model, overlap_grad_reduce=overlap)
    with wrapped.no_sync():
        step(wrapped)
    step(wrapped)
    wrapped.finish_grad_sync()
    assert all(param.grad is None for param in model.parameters())
    return {name: param.main_grad.clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("overlap", [False, True])
def test_fused_accumulation_gives_the_same_main_grads(overlap):
    fused = run_ranks(main_grads, 2, True, overlap)
    plain = run_ranks(main_grads, 2, False, overlap)
    for ours, theirs in zip(fused, plain):
        assert ours.keys() == theirs.keys()
        for name, grad in theirs.items():
            assert grad.any()
            torch.testing.assert_close(ours[name], grad, **CLOSE, msg=f"{name}: {{}}".format)


class Chain(torch.nn.Module):
    """Two linear layers whose weight gradients may come later."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(2)
        self.first = Linear(8, 16, **options)
        self.second = Linear(16, 4, **options)

    def forward(self, x):
        return self.second(self.first(x).sin())


def delayed_main_grads(delayed, fusion):
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    chain = Chain(delay_wgrad_compute=delayed, fuse_wgrad_accumulation=fusion)
    wrapped = wrap(config, chain, overlap_grad_reduce=True, delay_wgrad_compute=delayed)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for microbatch in range(2):
        last = microbatch == 1
        for group in wrapped.bucket_groups:
            group.is_last_microbatch = last
        wrapped(torch.randn(5, 8, generator=generator)).sum().backward()
        chain.second.backward_dw()
        chain.first.backward_dw()
    wrapped.finish_grad_sync()
    return [param.main_grad.clone() for param in chain.parameters()]


@pytest.mark.parametrize("fusion", [False, True])
def test_delayed_gradients_are_reduced_after_backward_dw(fusion):
    from megatron.core.distributed import DistributedDataParallelConfig

    if "delay_wgrad_compute" not in inspect.signature(DistributedDataParallelConfig).parameters:
        pytest.skip("megatron-core 0.12 does not delay weight gradients")
    plain = run_ranks(delayed_main_grads, 2, False, False)
    delayed = run_ranks(delayed_main_grads, 2, True, fusion)
    for ours, theirs in zip(delayed, plain):
        for given, true in zip(ours, theirs):
            assert true.any()
            torch.testing.assert_close(given, true, **CLOSE)
