"""Which backend a call gets, what it computes, and that no S x S tensor is ever made."""

import pytest
import torch

from mindspeed.ops.fusion_attention import sdpa

pytestmark = pytest.mark.gpu


def draw(batch, length, heads, size, dtype=torch.bfloat16):
    """Return (B, N, S, H) as a view of (S, B, N, H), as Megatron has it."""
    x = torch.randn(length, batch, heads, size, device="cuda", dtype=dtype)
    return x.requires_grad_().permute(1, 2, 0, 3)


def exact(q, k, v, visible):
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def kernels(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profile.key_averages())


@pytest.mark.parametrize("groups", [16, 4, 2])
@pytest.mark.parametrize("size", [64, 96, 128])
def test_long_causal_attention_runs_on_cudnn(groups, size):
    q, k, v = draw(2, 1024, 16, size), draw(2, 1024, groups, size), draw(2, 1024, groups, size)
    assert sdpa.prefers_cudnn(q, k, v)
    ran = kernels(lambda: sdpa.attention(q, k, v, scale=size**-0.5, is_causal=True))
    assert "cudnn" in ran, ran


@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("length", [64, 640])
@pytest.mark.parametrize("window", [None, (100, 0), (30, 20)])
def test_matches_float64_no_worse_than_unfused_attention(window, length, groups):
    torch.manual_seed(0)
    inputs = draw(2, length, 8, 64), draw(2, length, groups, 64), draw(2, length, groups, 64)
    position = torch.arange(length, device="cuda")
    ahead = position[None, :] - position[:, None]
    left, right = (length, 0) if window is None else window
    visible = (ahead <= right) & (ahead >= -left)
    grad = torch.randn_like(inputs[0])

    def run(function, *given):
        given = [x.detach().requires_grad_() for x in given]
        out = function(*given)
        out.backward(grad.to(out.dtype))
        return [out, *(x.grad for x in given)]

    def ours(q, k, v):
        if window is None:
            return sdpa.attention(q, k, v, scale=0.125, is_causal=True)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa.flash_attention(q, k, v, scale=0.125, dropout=0.0, window=window).transpose(
            1, 2
        )

    def eager(q, k, v):  # as Megatron's own: scores and weights are bfloat16 in memory
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * 0.125
        return scores.float().masked_fill(~visible, -1e4).softmax(-1).bfloat16() @ v

    want = run(lambda *a: exact(*a, visible), *(x.double() for x in inputs))
    for got, plain, true in zip(run(ours, *inputs), run(eager, *inputs), want):
        assert error(got, true) <= 1.05 * error(plain, true)


def test_packed_documents_in_one_launch():
    torch.manual_seed(0)
    bounds = [0, 50, 51, 128, 300]
    q = torch.randn(300, 8, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cu_seqlens = torch.tensor(bounds, device="cuda", dtype=torch.int32)
    documents = sdpa.Documents(cu_seqlens, cu_seqlens, 172, 172)
    got = sdpa.flash_attention(
        q, k, v, scale=0.125, dropout=0.0, window=(-1, 0), documents=documents
    )
    for start, end in zip(bounds, bounds[1:]):
        each = (x[start:end].transpose(0, 1)[None].double() for x in (q, k, v))
        visible = torch.ones(end - start, end - start, device="cuda", dtype=torch.bool).tril()
        want = exact(*each, visible)[0].transpose(0, 1)
        assert error(got[start:end], want) < 5e-3


@pytest.mark.parametrize("window", [(-1, 0), (512, 0)])
def test_memory_grows_with_the_sequence_not_its_square(window):
    length = 16384
    q, k, v = draw(1, length, 4, 64), draw(1, length, 1, 64), draw(1, length, 1, 64)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if window[0] < 0:
        out = sdpa.attention(q, k, v, scale=0.125, is_causal=True)
    else:
        flat = (x.transpose(1, 2) for x in (q, k, v))
        out = sdpa.flash_attention(*flat, scale=0.125, dropout=0.0, window=window)
    out.sum().backward()
    # One byte a score would be 32 times q.
    assert torch.cuda.max_memory_allocated() - before < 16 * q.nbytes


def test_output_of_megatrons_layout_is_not_copied():
    q, k, v = draw(2, 1024, 8, 64), draw(2, 1024, 2, 64), draw(2, 1024, 2, 64)
    out = sdpa.attention(q, k, v, scale=0.125, is_causal=True)
    assert out.permute(2, 0, 1, 3).is_contiguous()


@pytest.fixture
def same_bits():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("size", [64, 128])
def test_repeats_bits_with_cudnn_forward_and_flash_backward(size, groups, is_causal, same_bits):
    torch.manual_seed(0)
    length = 1000
    inputs = draw(2, length, 8, size), draw(2, length, groups, size), draw(2, length, groups, size)
    grad = torch.randn_like(inputs[0])

    def run():
        given = [x.detach().requires_grad_() for x in inputs]
        out = sdpa.attention(*given, scale=size**-0.5, is_causal=is_causal)
        return [out, *torch.autograd.grad(out, given, grad)]

    first = run()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, run()))
    ran = kernels(run)
    assert "cudnn" in ran and "flash_bwd" in ran and "bprop" not in ran, ran
    torch.use_deterministic_algorithms(False)
    visible = torch.ones(length, length, device="cuda", dtype=torch.bool)
    given = [x.detach().double().requires_grad_() for x in inputs]
    out = exact(*given, visible.tril() if is_causal else visible)
    for got, true in zip(first, [out, *torch.autograd.grad(out, given, grad.double())]):
        assert error(got, true) < 5e-3
