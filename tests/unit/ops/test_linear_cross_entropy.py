import pytest
import torch
from torch.nn import functional as F

from mindspeed.ops.linear_cross_entropy import linear_cross_entropy, reference

S, B, H, V = 3, 2, 16, 1301
ONE_SLICE, THREE_SLICES, SIX_SLICES = 10**9, S * B * 4 * 512, 1


def case(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(B, S, H).to(dtype).transpose(0, 1).requires_grad_()  # not contiguous
    weight = (torch.randn(V, H) / 2).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (S, B))
    labels[1, 1] = -100
    return hidden, weight, labels


def exact(hidden, weight, labels, grad):
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = wide[0] @ wide[1].t()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    return [loss.detach(), *torch.autograd.grad(loss, wide, grad.double().expand(S, B))]


GRADIENTS = {
    "scalar": torch.tensor(0.25).expand(S, B),
    "per token": torch.tensor([[1.0, 0.0], [0.5, 3.0], [-2.0, 0.0]]),
}


@pytest.mark.parametrize("grad", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("memory", [ONE_SLICE, THREE_SLICES, SIX_SLICES])
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_equals_float64(implementation, memory, grad):
    from mindspeed.ops.linear_cross_entropy import triton_impl

    hidden, weight, labels = case()
    module = reference if implementation == "reference" else triton_impl
    loss = module.linear_cross_entropy(hidden, weight, labels, memory=memory)
    assert loss.shape == (S, B) and loss.dtype == torch.float32
    got = [loss.detach(), *torch.autograd.grad(loss, (hidden, weight), grad)]
    want = exact(hidden, weight, labels, grad)
    for found, wanted in zip(got, want):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert (loss[labels == -100] == 0).all()


@pytest.mark.parametrize("memory", [ONE_SLICE, THREE_SLICES])
@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_adds_to_main_grad(implementation, memory, main_dtype):
    from mindspeed.ops.linear_cross_entropy import triton_impl

    hidden, weight, labels = case()
    weight.main_grad = torch.ones(V, H, dtype=main_dtype)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = True
    module = reference if implementation == "reference" else triton_impl
    for _ in range(2):  # two micro-batches
        loss = module.linear_cross_entropy(hidden, weight, labels, fused=True, memory=memory)
        loss.backward(GRADIENTS["per token"])
    _, _, want = exact(hidden, weight, labels, GRADIENTS["per token"])
    rtol, atol = (1e-5, 1e-5) if main_dtype == torch.float32 else (2**-6, 2**-6)
    torch.testing.assert_close(weight.main_grad.double(), 1 + 2 * want, rtol=rtol, atol=atol)
    assert weight.grad_added_to_main_grad
    assert (weight.grad == 0).all()


def test_gradient():
    hidden, weight, labels = case(torch.float64)
    hidden, weight = hidden.detach()[:1, :, :3].requires_grad_(), weight.detach()[:7, :3]
    labels = labels[:1] % 7
    weight.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, labels), (hidden, weight)
    )


@pytest.mark.parametrize("memory", [ONE_SLICE, THREE_SLICES])
def test_no_more_logits_than_memory_are_kept(memory):
    from mindspeed.ops.linear_cross_entropy import triton_impl

    hidden, weight, labels = case()
    hidden = hidden.detach().contiguous().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        triton_impl.linear_cross_entropy(hidden, weight, labels, memory=memory)
    width = min(V, memory // (S * B * 4))
    inputs = hidden.nbytes + weight.nbytes + labels.nbytes
    assert sum(t.nbytes for t in saved) == inputs + S * B * 4 + S * B * width * 4


@pytest.mark.parametrize(
    ("memory", "widths"),
    [(130_000, [1300]), (129_900, [1280, 20]), (60_000, [512, 512, 276]), (1, [256] * 5 + [20])],
)
def test_slices(memory, widths):
    from mindspeed.ops.linear_cross_entropy.triton_impl import cut

    slices = cut(100, 1300, memory)
    assert [part.stop - part.start for part in slices] == widths
    assert slices[0].start == 0 and slices[-1].stop == 1300


def test_a_second_backward_is_refused():
    from mindspeed.ops.linear_cross_entropy import triton_impl

    hidden, weight, labels = case()
    loss = triton_impl.linear_cross_entropy(hidden, weight, labels).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_gradients_that_are_wanted(frozen):
    from mindspeed.ops.linear_cross_entropy import triton_impl

    tensors = dict(zip(("hidden", "weight"), case()))
    tensors[frozen] = tensors[frozen].detach()
    labels = case()[2]
    triton_impl.linear_cross_entropy(*tensors.values(), labels).sum().backward()
    for name, tensor in tensors.items():
        assert (tensor.grad is None) == (name == frozen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.randn(5, 3)}, r"weight of shape \(V, 16\).*got \(5, 3\)"),
        ({"labels": torch.zeros(2, 3, dtype=torch.long)}, r"labels of shape \(3, 2\)"),
        ({"weight": torch.randn(V, H).bfloat16()}, "one type, got torch.float32 and torch.bfloat"),
        ({"fused": True}, "weight.main_grad and this weight has none"),
        ({"memory": 0}, "more than 0 bytes, got 0"),
    ],
)
def test_illegal_input_is_refused(changes, message):
    given = dict(zip(("hidden", "weight", "labels"), case())) | changes
    hidden, weight, labels = (given.pop(name) for name in ("hidden", "weight", "labels"))
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(hidden, weight, labels, **given)
