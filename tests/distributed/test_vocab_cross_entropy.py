"""Cross entropy over a split vocabulary against the whole one, and against Megatron's own."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from tests.ranks import run_ranks

S, B, V = 5, 3, 16


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case():
    logits = 4 * draw(0, S, B, V)
    target = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(1))
    return logits, target, draw(2, S, B)


def split_loss(dtype, smoothing):
    from mindspeed.te.pytorch.cross_entropy import parallel_cross_entropy

    logits, target, grad = case()
    target[2, 1] = -100
    shard = logits.to(dtype).chunk(dist.get_world_size(), -1)[dist.get_rank()]
    shard = shard.clone().requires_grad_()
    loss = parallel_cross_entropy(shard, target, smoothing, False, dist.group.WORLD, -100, False)
    loss.backward(grad)
    return loss.detach(), shard.grad


def split_kernel_loss(smoothing):
    import os

    os.environ["TRITON_INTERPRET"] = "1"
    from mindspeed.ops.cross_entropy import triton_impl

    logits, target, grad = case()
    target[2, 1] = -100
    shard = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
    loss = triton_impl.cross_entropy(shard, target, dist.group.WORLD, smoothing=smoothing)
    loss.backward(grad)
    return loss.detach(), shard.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_kernel_equals_the_whole_vocabulary(smoothing):
    compare_with_whole(run_ranks(split_kernel_loss, 2, smoothing), torch.float32, 1e-5, smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize("world", [2, 4])
def test_equals_the_whole_vocabulary(world, dtype, rtol, smoothing):
    compare_with_whole(run_ranks(split_loss, world, dtype, smoothing), dtype, rtol, smoothing)


def compare_with_whole(results, dtype, rtol, smoothing):
    logits, target, grad = case()
    target[2, 1] = -100
    whole = logits.to(dtype).double().requires_grad_()
    want = cross_entropy(
        whole.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing
    ).view(S, B)
    want.backward(grad.double())
    for loss, _ in results:
        torch.testing.assert_close(loss, want.detach().float(), rtol=1e-5, atol=1e-5)
    gathered = torch.cat([shard for _, shard in results], dim=-1)
    assert gathered.dtype == dtype
    torch.testing.assert_close(gathered.double(), whole.grad, rtol=rtol, atol=1e-6)


def megatron_and_ours():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from mindspeed.te.pytorch.cross_entropy import parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_model_parallel_group()
    logits, target, grad = case()
    shard = logits.chunk(2, -1)[dist.get_rank()]
    results = []
    for function in (
        lambda x: vocab_parallel_cross_entropy(x, target),
        lambda x: parallel_cross_entropy(x, target, 0.0, False, group),
    ):
        given = shard.clone().requires_grad_()
        # Megatron's own overwrites its input, so it gets a copy.
        loss = function(given * 1.0)
        loss.backward(grad)
        results.append((loss.detach(), given.grad))
    return results


def test_equals_megatrons_own():
    for theirs, ours in run_ranks(megatron_and_ours, 2):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def fused_loss_by_default(dtype):
    from megatron.core.fusions import fused_cross_entropy

    logits, target, grad = case()
    shard = logits.to(dtype).chunk(2, -1)[dist.get_rank()].clone().requires_grad_()
    served = fused_cross_entropy.fused_vocab_parallel_cross_entropy
    results = []
    for function in (served, served.__wrapped__):
        loss = function(shard * 1.0, target, dist.group.WORLD)
        results.append((loss.detach(), *torch.autograd.grad(loss, shard, grad.to(loss.dtype))))
    return results


def test_the_fused_loss_of_float32_logits_has_a_float32_gradient():
    logits, target, grad = case()
    whole = logits.double().requires_grad_()
    want = cross_entropy(whole.flatten(0, 1), target.flatten(), reduction="none").view(S, B)
    want.backward(grad.double())
    results = [served for served, _ in run_ranks(fused_loss_by_default, 2, torch.float32)]
    gradient = torch.cat([shard for _, shard in results], -1)
    torch.testing.assert_close(gradient.double(), whole.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][0], want.detach().float(), rtol=1e-5, atol=1e-5)


def test_the_fused_loss_of_bfloat16_logits_is_megatrons():
    for served, theirs in run_ranks(fused_loss_by_default, 2, torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(served, theirs, strict=True))


def served_by_the_operator():
    """Return what each of Megatron's three functions gives without and with the feature."""
    import mindspeed

    ranks = dist.get_world_size()
    from megatron.core import parallel_state
    from megatron.core.models.common.language_module import language_module

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    group = parallel_state.get_tensor_model_parallel_group()
    logits, target, grad = case()
    shard = logits.chunk(ranks, -1)[dist.get_rank()]

    def run(name):
        function = {
            "plain": lambda x: language_module.tensor_parallel.vocab_parallel_cross_entropy(
                x, target
            ),
            "native": lambda x: language_module.fused_vocab_parallel_cross_entropy(
                x, target, group
            ),
            "te": lambda x: language_module.te_parallel_cross_entropy(x, target, group),
        }[name]
        given = shard.clone().requires_grad_()
        loss = function(given * 1.0)
        loss.backward(grad)
        return loss.detach(), given.grad

    wanted = run("plain")
    mindspeed.enable(use_fused_cross_entropy=True)
    assert hasattr(language_module.fused_vocab_parallel_cross_entropy, "__wrapped__")
    assert hasattr(language_module.tensor_parallel.vocab_parallel_cross_entropy, "__wrapped__")
    return wanted, [run(name) for name in ("plain", "native", "te")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_feature_changes_no_number(ranks):
    for wanted, found in run_ranks(served_by_the_operator, ranks):
        for result in found:
            torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)


def count_collectives():
    from mindspeed.ops.cross_entropy import cross_entropy as split_cross_entropy

    numbers = []
    real = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        numbers.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counted
    logits, target, grad = case()
    shard = logits.chunk(2, -1)[dist.get_rank()].clone().requires_grad_()
    split_cross_entropy(shard, target, dist.group.WORLD).backward(grad)
    return numbers


def test_four_numbers_a_token_travel():
    assert run_ranks(count_collectives, 2) == [[S * B, 3 * S * B]] * 2
