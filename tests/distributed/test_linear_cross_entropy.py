"""Output layer and loss in one: plain Megatron's training, and the same over split vocabularies."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.gpt.layout import Layout
from tests.gpt.runs import STEPS, trained
from tests.ranks import run_ranks

T, H, V = 6, 8, 600


@pytest.mark.parametrize("adds_in_place", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(),  # tied embeddings
        Layout(tp=2),
        Layout("llama", tp=2, sequence_parallel=True),
        Layout("llama", pp=2, spec="te"),
    ],
    ids=str,
)
def test_same_training(layout, adds_in_place):
    expected = trained(layout.plain())
    for losses, norms, calls in run_ranks(train, layout.world, layout, adds_in_place):
        if None not in losses:  # the last stage
            assert calls == STEPS * layout.micro_batches
            assert losses == pytest.approx(expected.losses, rel=1e-6)
        assert norms == pytest.approx(expected.grad_norms, rel=1e-5)


def train(layout, adds_in_place):
    import mindspeed
    from mindspeed import device
    from mindspeed.ops.linear_cross_entropy import megatron
    from tests.gpt.training import Training

    calls, total = [], device.current().memory_total()
    operator = megatron.linear_cross_entropy

    def counted(*args, fused, **kwargs):
        assert fused == adds_in_place
        assert kwargs["memory"] == (3 * 2**29 if adds_in_place else total // 15)
        calls.append(1)
        return operator(*args, fused=fused, **kwargs)

    megatron.linear_cross_entropy = counted
    gib = {"linear_cross_entropy_gib": 1.5} if adds_in_place else {}
    mindspeed.enable(linear_cross_entropy=True, **gib)
    training = Training(layout)
    for chunk in training.chunks:
        if chunk.post_process:
            chunk.output_layer.gradient_accumulation_fusion = adds_in_place
    losses, norms = zip(*(training.step() for _ in range(STEPS)))
    return list(losses), list(norms), len(calls)


def logits_and_losses(_):
    import mindspeed
    from tests.gpt.training import Training

    model = Training(Layout()).chunks[0].eval()
    tokens = torch.arange(16).reshape(1, 16)
    inputs = (tokens, torch.arange(16).expand(1, -1), None)
    results = []
    for switch in (False, True):
        mindspeed.enable(linear_cross_entropy=switch)
        results.append((model(*inputs), model(*inputs, labels=tokens).detach()))
    assert "forward" not in vars(model.output_layer)
    return results


def test_without_labels_the_logits_are_returned():
    ((plain, fused),) = run_ranks(logits_and_losses, 1, None)
    assert torch.equal(plain[0], fused[0])
    torch.testing.assert_close(plain[1], fused[1], rtol=1e-6, atol=1e-6)


def split(memory):
    os.environ["TRITON_INTERPRET"] = "1"
    from mindspeed.ops.linear_cross_entropy import triton_impl

    hidden, weight, labels, grad = inputs()
    hidden = hidden.requires_grad_()
    shard = weight.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    loss = triton_impl.linear_cross_entropy(hidden, shard, labels, dist.group.WORLD, memory=memory)
    loss.backward(grad)
    dist.all_reduce(hidden.grad)
    return loss.detach(), hidden.grad, shard.grad


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=generator) for n in (T, V))
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[2] = -100
    return hidden, weight, labels, torch.rand(T, generator=generator)


@pytest.mark.parametrize("memory", [10**9, 1])
def test_kernels_over_a_split_vocabulary(memory):
    hidden, weight, labels, grad = inputs()
    wide = [t.double().requires_grad_() for t in (hidden, weight)]
    loss = F.cross_entropy(wide[0] @ wide[1].t(), labels, reduction="none")
    loss.backward(grad.double())
    results = run_ranks(split, 2, memory)
    for got_loss, got_hidden, _ in results:
        torch.testing.assert_close(got_loss.double(), loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got_hidden.double(), wide[0].grad, rtol=1e-5, atol=1e-6)
    got_weight = torch.cat([shard for *_, shard in results])
    torch.testing.assert_close(got_weight.double(), wide[1].grad, rtol=1e-5, atol=1e-6)
