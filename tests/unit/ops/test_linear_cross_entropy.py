import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from mindspeed.ops.linear_cross_entropy import linear_cross_entropy, reference
from mindspeed.ops.linear_cross_entropy.triton_impl import make_plan
from tests.unit.ops.pairwise import pairwise

S, B, H, V = 3, 2, 16, 1301
ONE_SLICE, FEW_COLUMNS, NO_COLUMNS = 10**9, S * B * 4 * 512, 1


def case(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(B, S, H).to(dtype).transpose(0, 1).requires_grad_()  # not contiguous
    weight = (torch.randn(V, H) / 2).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (S, B))
    labels[1, 1] = -100
    return hidden, weight, labels


def exact(hidden, weight, labels, grad):
    exact_inputs = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = exact_inputs[0] @ exact_inputs[1].t()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    return [loss.detach(), *torch.autograd.grad(loss, exact_inputs, grad.double().expand(S, B))]


GRADIENTS = {
    "scalar": torch.tensor(0.25).expand(S, B),
    "per token": torch.tensor([[1.0, 0.0], [0.5, 3.0], [-2.0, 0.0]]),
}


@pairwise(
    pytest.mark.parametrize("grad", GRADIENTS.values(), ids=GRADIENTS),
    pytest.mark.parametrize("memory", [ONE_SLICE, FEW_COLUMNS, NO_COLUMNS]),
    pytest.mark.parametrize("implementation", ["reference", "triton"]),
)
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


@pairwise(
    pytest.mark.parametrize("memory", [ONE_SLICE, FEW_COLUMNS, NO_COLUMNS]),
    pytest.mark.parametrize("implementation", ["reference", "triton"]),
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16]),
)
def test_half_types_are_no_worse_than_eager_torch(implementation, memory, dtype):
    from mindspeed.ops.linear_cross_entropy import triton_impl

    hidden, weight, labels = (x.detach() for x in case())
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    grad = GRADIENTS["per token"]
    module = reference if implementation == "reference" else triton_impl
    loss = module.linear_cross_entropy(hidden, weight, labels, memory=memory)
    got = [loss, *torch.autograd.grad(loss, (hidden, weight), grad)]
    logits = (hidden @ weight.t()).float().flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), reduction="none")
    loss = loss.view(S, B)
    eager = [loss, *torch.autograd.grad(loss, (hidden, weight), grad)]
    for ours, torchs, true in zip(got, eager, exact(hidden, weight, labels, grad), strict=True):
        assert ours.dtype == torchs.dtype
        errors = [(x.double() - true).norm() / true.norm() for x in (ours, torchs)]
        # Triton's interpreter cuts where the device rounds.
        assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps / 2


@pairwise(
    pytest.mark.parametrize("memory", [ONE_SLICE, FEW_COLUMNS]),
    pytest.mark.parametrize("implementation", ["reference", "triton"]),
    pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16]),
)
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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("memory", [ONE_SLICE, FEW_COLUMNS])
def test_no_more_logits_than_memory_are_kept(memory, fused):
    from mindspeed.ops.linear_cross_entropy import triton_impl

    hidden, weight, labels = case()
    hidden = hidden.detach().contiguous().requires_grad_()
    weight.main_grad = torch.zeros(V, H)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        triton_impl.linear_cross_entropy(hidden, weight, labels, fused=fused, memory=memory)
    column = S * B * 4
    logits = V * column if memory == ONE_SLICE else 4 * 128 * column
    gradient = 0
    if not fused and memory != ONE_SLICE:  # nine of eleven slices lie in the gradient's memory
        logits, gradient = (V - 9 * 128) * column, weight.nbytes
    inputs = hidden.nbytes + weight.nbytes + labels.nbytes + S * B * 4
    assert sum(t.nbytes for t in saved) == inputs + logits + gradient


def test_nothing_is_kept_without_a_backward():
    from mindspeed.ops.linear_cross_entropy import triton_impl

    hidden, weight, labels = case()
    with torch.no_grad():
        plan = triton_impl.plan_for(hidden.reshape(-1, H), weight, ONE_SLICE, False)
    assert (plan.in_gradient, plan.in_buffer) == (0, 1) and plan.buffer_size == S * B * 128
    expected = triton_impl.linear_cross_entropy(hidden, weight, labels)
    with torch.no_grad():
        torch.testing.assert_close(
            triton_impl.linear_cross_entropy(hidden, weight, labels), expected.detach()
        )


@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(1, 400),
    hidden=st.integers(1, 9),
    capacity=st.integers(0, 400),
    width=st.integers(16, 300),
    has_gradient=st.booleans(),
)
def test_no_slice_is_overwritten_before_it_is_read(
    tokens, vocabulary, hidden, capacity, width, has_gradient
):
    options = {"capacity": capacity, "width": width, "has_gradient": has_gradient}
    plan = make_plan(tokens, vocabulary, hidden, **options)
    assert sum(part.stop - part.start for part in plan.slices) == vocabulary
    assert plan.buffer_size <= tokens * max(capacity, min(width, 256))
    assert has_gradient or not plan.in_gradient
    buffer, gradient = torch.zeros(plan.buffer_size), torch.zeros(vocabulary, hidden)
    for index in reversed(range(len(plan.slices))):
        plan.storage(index, buffer, gradient).fill_(index + 1)
    for index, part in enumerate(plan.slices):
        if index < plan.num_stored:
            assert (plan.storage(index, buffer, gradient) == index + 1).all()
        gradient[part] = -1
        if index < plan.num_stored:  # not while the GEMM reads it, either
            assert (plan.storage(index, buffer, gradient) == index + 1).all()


def test_at_the_sizes_of_a_model_nothing_is_computed_again():
    options = {"capacity": int(1.9 * 2**30) // 16384, "width": 132 * 128, "has_gradient": True}
    plan = make_plan(8192, 151936, 4096, **options)
    assert (len(plan.slices), plan.in_gradient, plan.in_buffer) == (9, 3, 6)
    smaller = make_plan(8192, 151936, 1536, **options)
    assert (len(smaller.slices), smaller.in_gradient, smaller.in_buffer) == (9, 1, 7)


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
        ({"weight": torch.randn(V, H).bfloat16()}, "one dtype, got torch.float32 and torch.bfloat"),
        ({"fused": True}, "weight.main_grad and this weight has none"),
        ({"memory": 0}, "more than 0 bytes, got 0"),
    ],
)
def test_illegal_input_is_refused(changes, message):
    given = dict(zip(("hidden", "weight", "labels"), case())) | changes
    hidden, weight, labels = (given.pop(name) for name in ("hidden", "weight", "labels"))
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(hidden, weight, labels, **given)
