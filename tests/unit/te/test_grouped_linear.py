"""GroupedLinear and the FP8 padding around it."""

import pytest
import torch
import torch.nn.functional as F

from mindspeed.te.pytorch import Fp8Padding, Fp8Unpadding, GroupedLinear

IN, OUT = 6, 10


@pytest.mark.parametrize("splits", [[3, 4, 2], [0, 9, 0], [0, 0, 0]])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_a_loop_over_experts(splits, bias):
    torch.manual_seed(2)
    module = GroupedLinear(3, IN, OUT, bias=bias, params_dtype=torch.float64)
    for param in module.parameters():
        torch.nn.init.normal_(param)
    x = torch.randn(sum(splits), IN, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(sum(splits), OUT, dtype=torch.float64)
    out = module(x, splits, is_first_microbatch=True)
    out.backward(grad)

    start = 0
    for index, rows in enumerate(splits):
        piece = slice(start, start + rows)
        weight, offset = getattr(module, f"weight{index}"), getattr(module, f"bias{index}", None)
        torch.testing.assert_close(out[piece], F.linear(x[piece], weight, offset))
        torch.testing.assert_close(x.grad[piece], grad[piece] @ weight)
        torch.testing.assert_close(weight.grad, grad[piece].t() @ x[piece])
        if rows == 0:
            assert torch.equal(weight.grad, torch.zeros_like(weight))
        if bias:
            torch.testing.assert_close(offset.grad, grad[piece].sum(0))
        start += rows


def test_fused_gradient_of_an_empty_expert_is_exactly_zero():
    module = GroupedLinear(2, IN, OUT, bias=False, fuse_wgrad_accumulation=True)
    for param in module.parameters():
        param.main_grad = torch.zeros(OUT, IN)
    x, grad = torch.randn(4, IN), torch.randn(4, OUT)
    module(x, [4, 0]).backward(grad)
    torch.testing.assert_close(module.weight0.main_grad, grad.t() @ x)
    assert torch.equal(module.weight1.main_grad, torch.zeros(OUT, IN))


def test_return_bias_gives_one_bias_an_expert():
    module = GroupedLinear(2, IN, OUT, return_bias=True)
    torch.nn.init.normal_(module.bias1)
    x = torch.randn(4, IN)
    out, biases = module(x, [1, 3])
    torch.testing.assert_close(out[1:], x[1:] @ module.weight1.t())
    assert torch.equal(biases[0], module.bias0) and torch.equal(biases[1], module.bias1)
    assert GroupedLinear(2, IN, OUT, bias=False, return_bias=True)(x, [1, 3])[1] is None


def test_names_and_marks():
    module = GroupedLinear(2, IN, OUT, parallel_mode="row", tp_size=2)
    names = ["bias1", "weight1", "bias0", "weight0", "_extra_state"]
    assert list(module.state_dict()) == names  # as Megatron's buffers want them
    assert module.weight1.shape == (OUT, IN // 2) and module.weight1.partition_dim == 1


def test_weights_are_one_tensor_without_a_copy():
    from mindspeed.parallel.tensor.grouped_linear import together

    module = GroupedLinear(3, IN, OUT, bias=False)
    weights = [module.weight0, module.weight1, module.weight2]
    block = together(weights)
    assert block.data_ptr() == module.weight0.data_ptr()
    assert torch.equal(block, torch.stack([weight.data for weight in weights]))
    # As Megatron's buffers do: the last parameter first, each at a multiple of 64.
    buffer, start = torch.zeros(1000), 0
    for param in reversed(list(module.parameters())):
        place = buffer[start : start + param.numel()].view(param.shape)
        param.data = place.copy_(param.data)
        start += -(-param.numel() // 64) * 64
    moved = together(weights)
    assert moved.data_ptr() == buffer.data_ptr() and torch.equal(moved, block)
    # Anywhere else they are copied.
    module.weight1.data = module.weight1.data.clone()
    assert torch.equal(together(weights), block)
    x = torch.randn(4, IN)
    torch.testing.assert_close(module(x, [1, 2, 1])[1:3], x[1:3] @ module.weight1.t())


@pytest.mark.parametrize("splits", [[2, 2], [1, 1, 1]])
def test_counts_must_fit(splits):
    with pytest.raises(ValueError, match="must give 3 counts that add up to the 4 rows"):
        GroupedLinear(3, IN, OUT)(torch.randn(4, IN), splits)


@pytest.mark.parametrize("align, sizes", [(None, [16, 0, 32]), (8, [8, 0, 24])])
def test_padding_is_undone_by_unpadding(align, sizes):
    splits = [3, 0, 17]
    x = torch.randn(20, IN, requires_grad=True)
    padded, new_splits = Fp8Padding(3, align)(x, splits)
    assert new_splits == sizes and padded.shape == (sum(sizes), IN)
    assert torch.equal(padded[:3], x[:3]) and not padded[3 : sizes[0]].any()
    back = Fp8Unpadding(3, align)(padded, splits)
    assert torch.equal(back, x)
    back.backward(torch.arange(20.0).unsqueeze(1).expand(20, IN))
    assert torch.equal(x.grad, torch.arange(20.0).unsqueeze(1).expand(20, IN))


def test_padding_of_a_vector():
    padded, sizes = Fp8Padding(1)(torch.ones(3), [3])
    assert sizes == [16] and padded.sum() == 3
