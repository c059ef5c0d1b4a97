import pytest
import torch
from torch.nn import functional as F

from mindspeed.ops.cross_entropy import cross_entropy
from mindspeed.te.pytorch.cross_entropy import parallel_cross_entropy
from tests.unit.ops.pairwise import pairwise

S, B, V = 5, 3, 17


def case(dtype=torch.float64, scale=3.0):
    torch.manual_seed(0)
    logits = (torch.randn(S, B, V, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    target = torch.randint(0, V, (S, B))
    target[1, 2] = target[4, 0] = -100
    return logits, target


def expected(logits, target, smoothing, grad):
    exact = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(
        exact.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing
    ).view(target.shape)
    loss.backward(grad.double())
    return loss.detach(), exact.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_matches_torch(dtype, smoothing):
    logits, target = case(dtype)
    grad = torch.rand(S, B)
    loss = cross_entropy(logits, target, smoothing=smoothing)
    loss.backward(grad)
    want_loss, want_grad = expected(logits, target, smoothing, grad)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-6)
    # The gradient is rounded twice: kept for backward, then times the gradient of the loss.
    rtol = 2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(logits.grad.double(), want_grad, rtol=rtol, atol=1e-6)
    assert (loss[target == -100] == 0).all()
    assert (logits.grad[target == -100] == 0).all()


def test_gradient():
    logits, target = case()
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, target, smoothing=0.2), logits)


def test_large_and_infinite_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, float("-inf")]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1]))
    loss.backward()
    assert loss.item() == 2e4
    assert logits.grad.tolist() == [[1.0, -1.0, 0.0]]


def test_nothing_of_the_vocabulary_is_kept_without_gradient():
    logits, target = case(torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        cross_entropy(logits.detach(), target)
        assert saved == []
        cross_entropy(logits, target)
    assert [t.shape for t in saved] == [logits.shape]


@pairwise(
    pytest.mark.parametrize("smoothing", [0.0, 0.1]),
    pytest.mark.parametrize("dtype", [torch.float32, torch.float16]),
    pytest.mark.parametrize("vocabulary", [7, 4096, 9001]),
)
def test_kernel_equals_float64(vocabulary, dtype, smoothing):
    from mindspeed.ops.cross_entropy import triton_impl

    torch.manual_seed(0)
    # Every other row of a wider tensor: not contiguous.
    logits = (torch.randn(4, 4, vocabulary) * 4).to(dtype)[:, ::2].requires_grad_()
    target = torch.randint(0, vocabulary, (4, 2))
    target[1, 1] = 5
    grad = torch.rand(4, 2)
    loss = triton_impl.cross_entropy(logits, target, smoothing=smoothing, ignore_index=5)
    (got,) = torch.autograd.grad(loss, logits, grad)
    target = target.where(target != 5, -100)
    want_loss, want_grad = expected(logits, target, smoothing, grad)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-6, atol=2e-6)
    assert loss.dtype == torch.float32 and got.dtype == dtype
    rtol = torch.finfo(dtype).eps if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(got.double(), want_grad, rtol=rtol, atol=1e-6)
    assert (got[target == -100] == 0).all()


def test_kernel_with_infinite_logits():
    from mindspeed.ops.cross_entropy import triton_impl

    logits = torch.tensor([[1e4, -1e4, float("-inf")]], requires_grad=True)
    loss = triton_impl.cross_entropy(logits, torch.tensor([1]))
    loss.backward()
    assert loss.item() == 2e4
    assert logits.grad.tolist() == [[1.0, -1.0, 0.0]]
    empty = triton_impl.cross_entropy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    assert empty.shape == (0,)


def test_gradient_in_the_place_of_the_logits():
    from mindspeed.ops.cross_entropy import triton_impl

    leaf, target = case(torch.float32)
    logits = leaf * 1.0
    loss = triton_impl.cross_entropy(logits, target, in_place=True)
    (got,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    assert got.data_ptr() == logits.data_ptr()
    _, want = expected(leaf, target, 0.0, torch.ones(S, B))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_backward_fails_when_another_op_saved_the_logits():
    from mindspeed.ops.cross_entropy import triton_impl

    leaf, target = case(torch.float32)
    logits = leaf.tanh()  # needs its result in backward
    loss = triton_impl.cross_entropy(logits, target, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_kernel_saves_the_logits_and_one_number_a_token():
    from mindspeed.ops.cross_entropy import triton_impl

    logits, target = case(torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        triton_impl.cross_entropy(logits, target)
    assert saved[0].data_ptr() == logits.data_ptr()
    assert sum(t.nbytes for t in saved) == logits.nbytes + target.nbytes + 4 * target.numel()


def test_transformer_engine_call():
    logits, target = case(torch.float32)
    per_token = parallel_cross_entropy(logits, target, 0.0, False, None, -100, False)
    assert per_token.shape == (S, B)
    mean = parallel_cross_entropy(logits, target, reduce_loss=True)
    want = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    torch.testing.assert_close(mean, want)
    other = parallel_cross_entropy(logits, target.clamp(min=0), ignore_idx=int(target[0, 0]))
    assert other[0, 0] == 0.0


@pytest.mark.parametrize(
    ("target", "smoothing", "message"),
    [
        (
            torch.zeros(3, 2, dtype=torch.long),
            0.0,
            r"need a target of shape \(2, 3\), got \(3, 2\)",
        ),
        (torch.zeros(2, 3, dtype=torch.long), 1.0, "at least 0 and below 1, got 1.0"),
    ],
)
def test_bad_input(target, smoothing, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(torch.randn(2, 3, 4), target, smoothing=smoothing)
