"""Experts on gathered tokens by the package quack-kernels, and by the fallback."""

import pytest
import torch
from torch.nn.functional import silu

from mindspeed.device import hopper
from mindspeed.ops.expert_mlp import quack_impl
from mindspeed.ops.expert_mlp.reference import Reference, number_rows
from mindspeed.parallel.tensor import expert_mlp as expert_mlp_module
from mindspeed.parallel.tensor.expert_mlp import ExpertMatrices, expert_mlp

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN, COLUMNS, EXPERTS, TOP_K = 1100, 448, 320, 9, 3  # no multiple of a kernel's tile


@pytest.fixture(params=["quack", "reference"], autouse=True)
def kernels(_cuda, request, monkeypatch):
    if request.param == "quack" and not hopper.QUACK.is_here():
        pytest.skip("needs a Hopper GPU and the package quack-kernels")
    if request.param == "reference":
        monkeypatch.setattr(expert_mlp_module, "choose", lambda *_: Reference())
    return request.param


def chosen(kind):
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1))
    if kind == "skewed":
        scores[:, 0] += 1
        scores[:, 4:] -= torch.tensor([0.0, 0.3, 0.6, 0.9, 2.0])  # the last expert stays empty
    top_k = {"k = E": EXPERTS, "one expert": 1}.get(kind, TOP_K)
    if kind == "one expert":
        scores[:, 2] += 2
    mask = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    return mask.scatter_(1, scores.topk(top_k).indices, True).cuda()


def draw(mask, dtype=torch.bfloat16):
    torch.manual_seed(0)

    def randn(*size):
        return torch.randn(size, device="cuda", dtype=dtype) / size[-1] ** 0.5

    x, grad = randn(TOKENS, HIDDEN) * HIDDEN**0.5, randn(TOKENS, HIDDEN)
    first, second = randn(EXPERTS, 2 * COLUMNS, HIDDEN), randn(EXPERTS, HIDDEN, COLUMNS)
    probs = torch.rand(TOKENS, EXPERTS, device="cuda") * mask
    return x, probs, first, second, grad


def run(x, probs, first, second, grad, mask, totals=None):
    """Return the output and the gradients of x, probs, first and second."""
    x, probs = (one.detach().requires_grad_() for one in (x, probs))
    linears = []
    for number, matrix in enumerate((first, second)):
        weights = [one.detach().requires_grad_() for one in matrix]
        for index, weight in enumerate(weights):
            if totals is not None:
                weight.main_grad = totals[number][index]
        linears.append(ExpertMatrices(weights, totals is not None))
    rows, pairs = number_rows(mask, int(mask.sum()))
    out = expert_mlp(x, probs.reshape(-1).index_select(0, pairs), rows, *linears)
    out.backward(grad)
    matrices = totals
    if totals is None:
        matrices = [torch.stack([one.grad for one in linear.weights]) for linear in linears]
    return out.detach(), x.grad, probs.grad, *matrices


def exact(x, probs, first, second, grad, mask, cast=torch.Tensor.double):
    """Return the same by a loop over experts, in float64 or as torch rounds."""
    x, probs, first, second, grad = (cast(one).detach() for one in (x, probs, first, second, grad))
    leaves = [one.requires_grad_() for one in (x, probs, first, second)]
    out = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(zip(first, second)):
        tokens = mask[:, expert].nonzero()[:, 0]
        gate, up = (x[tokens] @ gate_up.t()).chunk(2, -1)
        rows = (silu(gate) * up) @ down.t() * probs[tokens, expert].unsqueeze(1)
        out = out.index_add(0, tokens, rows.to(out.dtype))
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


KINDS = pytest.mark.parametrize("kind", ["even", "skewed", "k = E", "one expert"])


@KINDS
def test_close_to_float64_and_no_worse_than_a_loop_of_torch(kernels, kind):
    mask = chosen(kind)
    tensors = draw(mask)
    found = run(*tensors, mask)
    want = exact(*tensors, mask)
    plain = exact(*tensors, mask, cast=lambda one: one)
    for name, one, other, true in zip(("out", "dx", "dprob", "dw1", "dw2"), found, plain, want):
        ours, theirs = error(one, true), error(other, true)
        print(f"{kernels:9} {kind:10} {name:5} {ours:.2e}, loop of torch {theirs:.2e}")
        assert ours <= max(1.3 * theirs, 2e-3) and ours < 1e-2
    empty = mask.sum(0) == 0
    assert not found[3][empty].any() and not found[4][empty].any()


def test_float16(kernels):
    mask = chosen("even")
    tensors = draw(mask, torch.float16)
    for one, true in zip(run(*tensors, mask), exact(*tensors, mask)):
        assert error(one, true) < 2e-3


@pytest.mark.parametrize("memory", ["side by side", "reversed", "unaligned"])
def test_gradients_are_added_to_main_grad(kernels, memory):
    mask = chosen("skewed")
    tensors = draw(mask)
    totals = []
    for matrix in tensors[2:4]:
        offset = 1 if memory == "unaligned" else 0
        flat = torch.full((matrix.numel() + offset,), 0.5, device="cuda")[offset:]
        lying = list(flat.view(matrix.shape))
        totals.append(lying[::-1] if memory == "reversed" else lying)
    *_, first, second = run(*tensors, mask, totals=totals)
    for added, true in zip((first, second), exact(*tensors, mask)[3:]):
        assert error(torch.stack(added) - 0.5, true) < 5e-3


def test_repeats_bits(kernels):
    mask = chosen("skewed")
    tensors = draw(mask)
    first = run(*tensors, mask)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, run(*tensors, mask)))


def test_the_kernels_of_the_package_are_used(kernels):
    mask = chosen("even")
    x, _, first, *_ = draw(mask)
    rows, _ = number_rows(mask, TOKENS * TOP_K)
    found = expert_mlp_module.choose(x, first, rows)
    assert isinstance(found, quack_impl.Quack if kernels == "quack" else Reference)


def test_a_layer_does_not_synchronise_and_keeps_tokens_and_preactivation(kernels):
    mask = chosen("even")
    x, probs, first, second, grad = draw(mask)
    weights = [[one.detach().requires_grad_() for one in matrix] for matrix in (first, second)]
    num_rows = TOKENS * TOP_K
    leaf, factors = x.detach().requires_grad_(), probs.detach().requires_grad_()

    def forward():
        rows, pairs = number_rows(mask, num_rows)
        return expert_mlp(
            *(leaf, factors.reshape(-1).index_select(0, pairs), rows),
            *(ExpertMatrices(one) for one in weights),
        )

    forward().backward(grad)  # compiles, and makes the libraries take their workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = forward()
        kept = torch.cuda.memory_allocated() - before - out.nbytes
        out.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # x is the caller's. Of row numbers and weights, at most 40 bytes a row; 512 an allocation.
    preact = num_rows * 2 * COLUMNS * x.itemsize
    print(f"{kernels}: {kept} bytes kept beside x, {preact} of the pre-activation")
    assert preact <= kept <= preact + 40 * num_rows + 16 * TOKENS + 16 * 512
    assert kept + x.nbytes <= 1.1 * (x.nbytes + preact)
