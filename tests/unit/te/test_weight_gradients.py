"""Where the weight gradient goes: main_grad, a placeholder for Megatron's hooks, or a queue."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from mindspeed.te.pytorch import GroupedLinear, Linear

IN, OUT = 12, 20


def make(**options):
    torch.manual_seed(5)
    return Linear(IN, OUT, bias=False, **options)


def plain_gradient(x, grad):
    return grad.double().flatten(0, -2).t() @ x.double().flatten(0, -2)


@pytest.mark.parametrize("hooks", [False, True])
def test_main_grad_gets_the_sum_of_all_microbatches(hooks):
    module = make(fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.ones(OUT, IN)
    expected = torch.ones(OUT, IN, dtype=torch.float64)
    for _ in range(3):
        x, grad = torch.randn(4, 2, IN, requires_grad=True), torch.randn(4, 2, OUT)
        if hooks:  # offloading and recompute hand a copy of the weight to backward
            with save_on_cpu():
                out = module(x)
        else:
            out = module(x)
        out.backward(grad)
        expected += plain_gradient(x, grad)
        torch.testing.assert_close(x.grad, grad @ module.weight)
    torch.testing.assert_close(module.weight.main_grad.double(), expected, rtol=1e-5, atol=1e-5)
    assert module.weight.grad is None


def test_half_products_are_not_rounded_on_the_way_to_float32():
    module = make(fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16)
    module.weight.main_grad = torch.zeros(OUT, IN)
    x, grad = torch.randn(64, IN).bfloat16(), torch.randn(64, OUT).bfloat16()
    module(x).backward(grad)
    expected = plain_gradient(x, grad)
    torch.testing.assert_close(module.weight.main_grad.double(), expected, rtol=1e-5, atol=1e-5)
    rounded = expected.bfloat16().double()
    assert (rounded - expected).abs().max() > 1e-3  # the test could tell


def test_megatrons_hooks_see_a_placeholder():
    module = make(fuse_wgrad_accumulation=True)
    weight = module.weight
    weight.main_grad = torch.zeros(OUT, IN)
    weight.grad_added_to_main_grad = False
    x, grad = torch.randn(4, IN), torch.randn(4, OUT)
    module(x).backward(grad)
    assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape

    weight.grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = None, False, True
    module(x).backward(grad)
    assert weight.grad_added_to_main_grad and torch.equal(weight.grad, torch.zeros(OUT, IN))
    expected = 2 * plain_gradient(x, grad)
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_fusion_without_main_grad_says_what_to_do():
    with pytest.raises(RuntimeError, match="gradient_accumulation_fusion=False"):
        make(fuse_wgrad_accumulation=True)(torch.randn(2, IN)).sum().backward()


@pytest.mark.parametrize("fused", [False, True])
def test_delayed_gradients_come_in_order_and_call_megatrons_hooks(fused):
    module = make(delay_wgrad_compute=True, fuse_wgrad_accumulation=fused)
    assert module.weight.skip_backward_post_hook
    module.weight.main_grad = torch.zeros(OUT, IN)
    seen = []
    result = "main_grad" if fused else "grad"
    module.register_wgrad_accumulation_and_reduce_hooks(
        lambda: seen.append(getattr(module.weight, result).clone())
    )
    batches = [(torch.randn(4, IN, requires_grad=True), torch.randn(4, OUT)) for _ in range(2)]
    for x, grad in batches:
        module(x).backward(grad)
        torch.testing.assert_close(x.grad, grad @ module.weight)
    assert module.weight.grad is None and not module.weight.main_grad.any()

    first, second = (plain_gradient(x, grad).float() for x, grad in batches)
    module.backward_dw()
    module.backward_dw()
    torch.testing.assert_close(seen[0], first)
    torch.testing.assert_close(seen[1], first + second)
    assert not any(grad.requires_grad for grad in seen)
    with pytest.raises(RuntimeError, match="call it once after each backward"):
        module.backward_dw()


def test_delayed_and_fused_still_shows_the_hooks_a_placeholder():
    module = make(delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(OUT, IN)
    module.weight.grad_added_to_main_grad = False
    module(torch.randn(4, IN)).sum().backward()
    # Megatron's delayed hook refuses to run without a gradient when it overlaps the reduction.
    assert module.weight.grad is not None and module.weight.grad_added_to_main_grad
    assert not module.weight.main_grad.any()
    module.backward_dw()
    assert module.weight.main_grad.any()


def test_backward_dw_without_delay_does_nothing():
    module = make()
    module(torch.randn(4, IN)).sum().backward()
    before = module.weight.grad.clone()
    module.backward_dw()
    assert torch.equal(module.weight.grad, before)


def test_delayed_gradients_of_all_experts():
    torch.manual_seed(5)
    module = GroupedLinear(3, IN, OUT, bias=False, delay_wgrad_compute=True)
    x, grad = torch.randn(7, IN), torch.randn(7, OUT)
    module(x, [4, 0, 3]).backward(grad)
    assert all(weight.grad is None for weight in module.parameters())
    module.backward_dw()
    torch.testing.assert_close(module.weight0.grad, plain_gradient(x[:4], grad[:4]).float())
    assert torch.equal(module.weight1.grad, torch.zeros(OUT, IN))
    torch.testing.assert_close(module.weight2.grad, plain_gradient(x[4:], grad[4:]).float())


@pytest.mark.parametrize("experts", [None, [3, 0, 4]])
def test_a_bfloat16_main_grad_gets_the_sum_of_all_microbatches(experts):
    """Gradients reduced in bfloat16 (--accumulate-allreduce-grads-in-fp32 off) add up as well."""
    torch.manual_seed(5)
    options = {"fuse_wgrad_accumulation": True, "params_dtype": torch.bfloat16, "bias": False}
    module = GroupedLinear(3, IN, OUT, **options) if experts else Linear(IN, OUT, **options)
    weights = list(module.parameters())
    for weight in weights:
        weight.main_grad = torch.ones(OUT, IN, dtype=torch.bfloat16)
    expected = [torch.ones(OUT, IN, dtype=torch.float64) for _ in weights]
    for _ in range(2):
        x, grad = torch.randn(7, IN).bfloat16(), torch.randn(7, OUT).bfloat16()
        module(x, *([experts] if experts else [])).backward(grad)
        rows = zip(x.split(experts or 7), grad.split(experts or 7))
        expected = [total + plain_gradient(*pair) for total, pair in zip(expected, rows)]
    # Two roundings to 8 bits, of sums up to 16.
    by_name = sorted(module.named_parameters())
    for (_, weight), total in zip(by_name, expected, strict=True):
        torch.testing.assert_close(weight.main_grad.double(), total, rtol=1e-2, atol=0.1)
        assert weight.grad is None


@pytest.mark.parametrize("fused", [False, True])
def test_delayed_gradients_of_experts_add_up(fused):
    torch.manual_seed(5)
    options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": fused}
    module = GroupedLinear(2, IN, OUT, bias=False, **options)
    for weight in module.parameters():
        weight.main_grad = torch.zeros(OUT, IN)
    batches = [(torch.randn(7, IN), torch.randn(7, OUT), [4, 3]) for _ in range(2)]
    for x, grad, counts in batches:
        module(x, counts).backward(grad)
    expected = torch.zeros(2, OUT, IN)
    for x, grad, counts in batches:
        module.backward_dw()
        rows = zip(x.split(counts), grad.split(counts))
        expected += torch.stack([plain_gradient(*pair).float() for pair in rows])
        for weight, total in zip((module.weight0, module.weight1), expected):
            torch.testing.assert_close(weight.main_grad if fused else weight.grad, total)


def test_a_frozen_weight_gets_nothing():
    module = make(fuse_wgrad_accumulation=True)
    module.weight.requires_grad_(False)
    x = torch.randn(4, IN, requires_grad=True)
    module(x).sum().backward()
    assert module.weight.grad is None
    torch.testing.assert_close(x.grad, module.weight.sum(0).expand(4, IN))


@pytest.mark.parametrize("shape", [(4, IN), (3, 2, IN)], ids=str)
def test_the_output_of_a_frozen_weight_can_be_changed_in_place(shape):
    module = make()
    module.weight.requires_grad_(False)
    x = torch.randn(shape, requires_grad=True)
    out = module(x)
    out += 2 * out.detach()  # as Megatron adds the biases of experts
    out.sum().backward()
    torch.testing.assert_close(x.grad, module.weight.sum(0).expand(shape))
