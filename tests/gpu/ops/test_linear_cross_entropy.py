"""Output layer and loss in one at real shapes against float64, next to what eager torch does."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.linear_cross_entropy import linear_cross_entropy
from mindspeed.ops.linear_cross_entropy.labelled_rows import LabelledRows

pytestmark = pytest.mark.gpu
T, H, V = 512, 1536, 151936
WHOLE, HALF = T * V * 2, T * V


def formula(hidden, weight, labels):
    logits = torch.nn.functional.linear(hidden, weight)
    acc_dtype = torch.promote_types(logits.dtype, torch.float32)
    return torch.nn.functional.cross_entropy(logits.to(acc_dtype), labels, reduction="none")


def inputs(dtype=torch.bfloat16):
    torch.manual_seed(0)
    where = device.current().torch_device
    hidden = torch.randn(T, H, device=where).to(dtype)
    weight = (torch.randn(V, H, device=where) * 2 * H**-0.5).to(dtype)
    labels = torch.randint(0, V, (T,), device=where)
    labels[3] = -100
    return hidden, weight, labels, torch.rand(T, device=where)


def run(function, hidden, weight, labels, grad):
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    loss = function(*leaves, labels)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, grad.to(loss.dtype))]


@pytest.mark.parametrize("memory", [WHOLE, HALF])
def test_error_is_no_worse_than_eagers(memory):
    hidden, weight, labels, grad = inputs()

    def ours(*args):
        return linear_cross_entropy(*args, memory=memory)

    exact = run(formula, hidden.double(), weight.double(), labels, grad)
    eager, first, second = (run(f, hidden, weight, labels, grad) for f in (formula, ours, ours))
    for truth, plain, got, again in zip(exact, eager, first, second):
        assert torch.equal(got, again)
        error, allowed = ((t.double() - truth).norm() / truth.norm() for t in (got, plain))
        assert error <= allowed * 1.05


def test_main_grad_is_not_rounded():
    hidden, weight, labels, grad = inputs()
    leaf = weight.clone().requires_grad_()
    leaf.main_grad = torch.zeros(V, H, device=weight.device)
    linear_cross_entropy(hidden, leaf, labels, fused=True, memory=HALF).backward(grad)
    _, _, truth = run(formula, hidden.double(), weight.double(), labels, grad)
    _, _, eager = run(formula, hidden, weight, labels, grad)
    error, allowed = ((t.double() - truth).norm() for t in (leaf.main_grad, eager))
    assert error <= allowed


@pytest.mark.parametrize("memory", [WHOLE, HALF])
def test_peak_memory(memory):
    current = device.current()
    hidden, weight, labels, grad = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    weight.main_grad = torch.zeros(V, H, device=weight.device)
    for _ in range(2):  # the first run loads kernels and their workspaces
        hidden.grad = None
        before = current.memory_allocated()
        current.reset_peak_memory()
        linear_cross_entropy(hidden, weight, labels, fused=True, memory=memory).backward(grad)
        extra = current.max_memory_allocated() - before
    # The logits that are kept, the gradient of hidden (where it is a sum, in float32 first), and
    # what cuBLAS takes for sums that it splits.
    gradient = hidden.nbytes * (1 if memory == WHOLE else 3)
    assert extra <= memory + gradient + 2**20


def test_logits_wait_in_the_memory_of_the_gradient():
    current = device.current()
    hidden, weight, labels, grad = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    for _ in range(2):
        hidden.grad = weight.grad = None
        before = current.memory_allocated()
        current.reset_peak_memory()
        linear_cross_entropy(hidden, weight, labels, memory=HALF).backward(grad)
        extra = current.max_memory_allocated() - before
    # With fewer tokens than the hidden size all slices but one fit there.
    one_slice = T * 128 * current.multiprocessors() * 2
    assert extra <= weight.nbytes + one_slice + 3 * hidden.nbytes + 2**20


def test_rows_with_a_label_are_enough():
    """Errors are no worse than those of all rows, and nothing waits for the device."""
    hidden, weight, labels, grad = inputs()
    mask = torch.arange(T) % 4 > 0
    mask[3] = False  # has no label
    found, grad = LabelledRows.of(mask[None]), grad * mask.to(grad.device)
    rows = LabelledRows(found.index.to(hidden.device), found.count)

    def ours(hidden, weight, labels):
        picked, few = rows.pick(hidden[:, None], labels[:, None])
        return rows.spread(linear_cross_entropy(picked, weight, few, memory=HALF), like=labels)

    def all_rows(*args):
        return linear_cross_entropy(*args, memory=HALF)

    exact = run(formula, hidden.double(), weight.double(), labels, grad)
    whole, first = (run(f, hidden, weight, labels, grad) for f in (all_rows, ours))
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run(ours, hidden, weight, labels, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact[0], whole[0] = (t * mask.to(t.device) for t in (exact[0], whole[0]))
    for truth, plain, got, again in zip(exact, whole, first, second):
        assert torch.equal(got, again)
        error, allowed = ((t.double() - truth).norm() / truth.norm() for t in (got, plain))
        assert error <= allowed * 1.05
