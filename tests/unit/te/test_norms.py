"""LayerNorm and RMSNorm against the formula in float64."""

import pytest
import torch

from mindspeed.te.pytorch import LayerNorm, RMSNorm

SIZE = 24
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def formula(norm, x, weight, bias, eps, zero_centered):
    gamma = weight + 1 if zero_centered else weight
    centred = x - x.mean(-1, keepdim=True) if norm is LayerNorm else x
    out = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps) * gamma
    return out if bias is None else out + bias


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_values_and_gradients_follow_the_formula(norm, dtype, zero_centered):
    torch.manual_seed(1)
    module = norm(hidden_size=SIZE, eps=1e-3, zero_centered_gamma=zero_centered, params_dtype=dtype)
    for param in module.parameters():
        torch.nn.init.normal_(param)
    x = torch.randn(5, 3, SIZE, dtype=dtype, requires_grad=True)
    grad = torch.randn(5, 3, SIZE, dtype=dtype)
    out = module(x)
    out.backward(grad)

    inputs = [x, *module.parameters()]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    bias = exact[2] if norm is LayerNorm else None
    expected = formula(norm, exact[0], exact[1], bias, 1e-3, zero_centered)
    expected.backward(grad.double())

    assert out.dtype == dtype
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit)
    for given, true in zip(inputs, exact):
        assert given.grad.dtype == dtype
        error = (given.grad.double() - true.grad).abs().max()
        assert error <= limit * true.grad.abs().max()


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_mixed_types_meet_in_float32_and_leave_in_the_parameters_type(norm):
    module = norm(SIZE, params_dtype=torch.bfloat16)
    x = torch.randn(4, SIZE) * 3 + 1
    out = module(x)
    assert out.dtype == torch.bfloat16
    # Rounding x first would be visible: an input of 3 +- 1e-3 has no spread left in bfloat16.
    tight = 3 + 1e-3 * torch.randn(4, SIZE)
    expected = formula(norm, tight.double(), torch.ones(SIZE), None, 1e-5, False)
    torch.testing.assert_close(module(tight).double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_half_inputs_lose_nothing_before_the_last_rounding(norm):
    x = torch.randn(64, 512, dtype=torch.bfloat16)
    out = norm(512, params_dtype=torch.bfloat16)(x)
    expected = formula(norm, x.double(), torch.ones(512), None, 1e-5, False).to(torch.bfloat16)
    # Half a unit in the last place either way is all that may differ.
    assert (out != expected).float().mean() < 0.01


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_output_type(autocast):
    with torch.autocast("cpu", dtype=autocast):
        assert RMSNorm(SIZE)(torch.randn(2, SIZE)).dtype == autocast


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_carry_the_sequence_parallel_mark(sequence_parallel):
    module = LayerNorm(normalized_shape=SIZE, sequence_parallel=sequence_parallel)
    assert [p.sequence_parallel for p in module.parameters()] == [sequence_parallel] * 2


@pytest.mark.parametrize("zero_centered", [False, True])
def test_meta_parameters_become_real_and_keep_their_marks(zero_centered):
    module = LayerNorm(
        SIZE, device="meta", sequence_parallel=True, zero_centered_gamma=zero_centered
    )
    assert module.weight.is_meta
    module.reset_parameters()
    assert module.weight.sequence_parallel and module.bias.sequence_parallel
    assert torch.equal(module.weight, torch.full((SIZE,), 0.0 if zero_centered else 1.0))
    assert torch.equal(module.bias, torch.zeros(SIZE))


def test_checkpoints_hold_parameters_only_and_foreign_extra_state_is_dropped():
    module = LayerNorm(SIZE)
    assert list(module.state_dict()) == ["weight", "bias"]
    state = {**module.state_dict(), "_extra_state": torch.empty(0, dtype=torch.uint8)}
    module.load_state_dict(state, strict=True)


def test_a_size_is_needed():
    with pytest.raises(TypeError, match="RMSNorm needs normalized_shape"):
        RMSNorm()
