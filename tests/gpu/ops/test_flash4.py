"""Attention by flash-attn-4: where it runs, what it computes, and that it is asked for it."""

from itertools import accumulate

import pytest
import torch
import torch.utils.flop_counter

from mindspeed.device import hopper
from mindspeed.ops import npu_fusion_attention
from mindspeed.ops.fusion_attention import flash4, sdpa
from tests.gpu.ops.test_attention_backend import draw, error, exact, kernels

pytestmark = pytest.mark.gpu
LENGTH = 2304  # no multiple of a kernel's tile of 128 queries and keys times its waves


@pytest.fixture(autouse=True)
def _installed(_cuda):
    if not hopper.FLASH_ATTENTION.is_here():
        pytest.skip("needs a Hopper GPU and the package flash-attn-4")


def run(inputs, grad, is_causal):
    given = [x.detach().requires_grad_() for x in inputs]
    out = sdpa.attention(*given, scale=given[0].shape[-1] ** -0.5, is_causal=is_causal)
    return [out, *torch.autograd.grad(out, given, grad)]


def true(inputs, grad, is_causal):
    given = [x.detach().double().requires_grad_() for x in inputs]
    visible = torch.ones(LENGTH, LENGTH, device="cuda", dtype=torch.bool)
    out = exact(*given, visible.tril() if is_causal else visible)
    return [out, *torch.autograd.grad(out, given, grad.double())]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("groups", "size"), [(6, 64), (2, 128), (1, 128)])
def test_matches_float64_no_worse_than_cudnn(groups, size, is_causal, monkeypatch):
    torch.manual_seed(0)
    inputs = [draw(2, LENGTH, heads, size) for heads in (6, groups, groups)]
    grad = torch.randn_like(inputs[0])
    want = true(inputs, grad, is_causal)
    got = run(inputs, grad, is_causal)
    assert "flash_attncute" in kernels(lambda: run(inputs, grad, is_causal))
    monkeypatch.setattr(hopper.Package, "is_here", lambda _: False)
    for ours, other, exactly in zip(got, run(inputs, grad, is_causal), want):
        assert error(ours, exactly) <= 1.05 * error(other, exactly)


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_the_operator_of_the_documents_takes_it(is_repeatable):
    torch.manual_seed(0)
    inputs = [draw(2, LENGTH, heads, 128) for heads in (6, 2, 2)]
    mask = torch.ones(2048, 2048, device="cuda", dtype=torch.bool).triu(1)
    grad = torch.randn_like(inputs[0])
    given = [x.detach().requires_grad_() for x in inputs]
    call = {"scale": 128**-0.5, "atten_mask": mask, "sparse_mode": 2}

    def both():
        out, largest, total, *_ = npu_fusion_attention(*given, 6, "BNSD", **call)
        return [out, *torch.autograd.grad(out, given, grad)], largest[..., 0] + total[..., 0].log()

    torch.use_deterministic_algorithms(is_repeatable)
    got, lse = both()
    ran = kernels(both)
    torch.use_deterministic_algorithms(False)
    assert "flash_attncute" in ran
    for ours, exactly in zip(got, true(inputs, grad, True)):
        assert error(ours, exactly) < 5e-3
    k = inputs[1].repeat_interleave(3, 1).double()
    scores = inputs[0].double() @ k.transpose(-1, -2) * 128**-0.5
    hidden = torch.ones(LENGTH, LENGTH, device="cuda", dtype=torch.bool).triu(1)
    want = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(lse.double(), want, rtol=1e-3, atol=1e-3)


def test_megatrons_layout_is_not_copied():
    inputs = [draw(2, LENGTH, heads, 128) for heads in (6, 2, 2)]
    grad = torch.randn_like(inputs[0])
    results = run(inputs, grad, True)
    assert all(x.permute(2, 0, 1, 3).is_contiguous() for x in results)
    assert "copy" not in kernels(lambda: run(inputs, grad, True))


def test_repeats_bits_where_that_is_asked_for():
    torch.manual_seed(0)
    inputs = [draw(2, LENGTH, heads, 128) for heads in (6, 2, 2)]
    grad = torch.randn_like(inputs[0])
    torch.use_deterministic_algorithms(True)
    first = run(inputs, grad, True)
    again = [run(inputs, grad, True) for _ in range(4)]
    ran = kernels(lambda: run(inputs, grad, True))
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in again for a, b in zip(first, other))
    assert "flash_attncute" in ran
    for got, exactly in zip(first, true(inputs, grad, True)):
        assert error(got, exactly) < 5e-3


def test_stands_back():
    inputs = [draw(1, LENGTH, heads, 128) for heads in (4, 2, 2)]
    assert flash4.supports(*inputs, True, 0.0)
    assert not flash4.supports(*inputs, True, 0.1)
    assert not flash4.supports(*(x[:, :, :512] for x in inputs), True, 0.0)
    assert not flash4.supports(inputs[0][:, :, :2100], *inputs[1:], True, 0.0)
    even = [draw(1, LENGTH, 4, 128) for _ in range(3)]  # torch counts no others
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        run(even, torch.randn_like(even[0]), True)
    assert counter.get_total_flops() > 0
    torch.backends.cuda.enable_flash_sdp(False)
    refused = not flash4.supports(*inputs, True, 0.0)
    torch.backends.cuda.enable_flash_sdp(True)
    assert refused


EVEN = (1100, 129, 1, 600, 470)
OTHER = (1200, 129, 64, 300, 900)  # the fourth has queries that see no key
MANY = (600, *(5,) * 300)  # more than the package looks through one by one


def draw_packed(of_q, of_k, groups, size):
    shapes = (sum(of_q), 6), (sum(of_k), groups), (sum(of_k), groups)
    return [torch.randn(*shape, size, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def run_packed(inputs, grad, of_q, of_k, is_causal):
    given = [x.detach().requires_grad_() for x in inputs]
    bounds = (torch.tensor([0, *accumulate(of)]).int().cuda() for of in (of_q, of_k))
    out = sdpa.flash_attention(
        *given,
        scale=given[0].shape[-1] ** -0.5,
        dropout=0.0,
        window=(-1, 0 if is_causal else -1),
        documents=sdpa.Documents(*bounds, max(of_q), max(of_k)),
    )
    return [out, *torch.autograd.grad(out, given, grad)]


def true_packed(inputs, grad, of_q, of_k, is_causal):
    given = [x.detach().double().requires_grad_() for x in inputs]
    found = []
    for each in zip(*(x.split(of) for x, of in zip(given, (of_q, of_k, of_k)))):
        q, k, v = (x.transpose(0, 1)[None] for x in each)
        num_q, num_k = q.shape[2], k.shape[2]
        blind = max(num_q - num_k, 0) if is_causal else 0
        visible = torch.ones(num_q - blind, num_k, device="cuda", dtype=torch.bool)
        visible = visible.tril(num_k - num_q + blind) if is_causal else visible
        out = exact(q[:, :, blind:], k, v, visible)[0].transpose(0, 1)
        found += [out.new_zeros(blind, *out.shape[1:]), out]
    out = torch.cat(found)
    return [out, *torch.autograd.grad(out, given, grad.double())]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("groups", "size"), [(6, 64), (2, 128), (1, 128)])
@pytest.mark.parametrize(
    ("of_q", "of_k"), [(EVEN, EVEN), (EVEN, OTHER), (MANY, MANY)], ids=["even", "other", "many"]
)
def test_packed_documents_match_float64(of_q, of_k, groups, size, is_causal):
    torch.manual_seed(0)
    inputs = draw_packed(of_q, of_k, groups, size)
    grad = torch.randn_like(inputs[0])
    given = inputs, grad, of_q, of_k, is_causal
    for ours, exactly in zip(run_packed(*given), true_packed(*given)):
        assert error(ours, exactly) < 5e-3
    assert "flash_attncute" in kernels(lambda: run_packed(*given))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("groups", [6, 2])
def test_packed_documents_repeat_bits_where_that_is_asked_for(groups, is_causal):
    torch.manual_seed(0)
    inputs = draw_packed(EVEN, EVEN, groups, 128)
    grad = torch.randn_like(inputs[0])
    given = inputs, grad, EVEN, EVEN, is_causal
    torch.use_deterministic_algorithms(True)
    first = run_packed(*given)
    again = [run_packed(*given) for _ in range(4)]
    ran = kernels(lambda: run_packed(*given))
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in again for a, b in zip(first, other))
    assert "flash_attncute" in ran
    for got, exactly in zip(first, true_packed(*given)):
        assert error(got, exactly) < 5e-3


@pytest.mark.parametrize("mode", [0, 2, 3])
def test_the_operator_of_the_documents_takes_it_for_packed_ones(mode):
    torch.manual_seed(0)
    inputs = draw_packed(EVEN, EVEN, 2, 128)
    grad = torch.randn_like(inputs[0])
    given = [x.detach().requires_grad_() for x in inputs]
    ends = list(accumulate(EVEN))
    call = {"scale": 128**-0.5, "actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    if mode:
        mask = torch.ones(2048, 2048, device="cuda", dtype=torch.bool).triu(1)
        call |= {"atten_mask": mask, "sparse_mode": mode}

    def both():
        out, largest, total, *_ = npu_fusion_attention(*given, 6, "TND", **call)
        return [out, *torch.autograd.grad(out, given, grad)], largest[..., 0] + total[..., 0].log()

    got, lse = both()
    assert "flash_attncute" in kernels(both)
    for ours, exactly in zip(got, true_packed(inputs, grad, EVEN, EVEN, bool(mode))):
        assert error(ours, exactly) < 5e-3
    q, k = inputs[0][:1100].double(), inputs[1][:1100].repeat_interleave(3, 1).double()
    scores = torch.einsum("qnh,knh->nqk", q, k) * 128**-0.5
    hidden = torch.ones(1100, 1100, device="cuda", dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, float("-inf")) if mode else scores
    want = scores.logsumexp(-1).transpose(0, 1)
    torch.testing.assert_close(lse[:1100].double(), want, rtol=1e-3, atol=1e-3)
