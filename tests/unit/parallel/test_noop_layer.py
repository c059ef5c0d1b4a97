"""Layers that do nothing: what they hand on, and that Megatron-LM's reports do not count them."""

from types import SimpleNamespace

import pytest
import torch

import mindspeed.megatron_adaptor  # noqa: F401  # before Megatron, as in a user's script
from mindspeed.parallel.pipeline.noop_layer import NoopLayer, wrap_num_floating_point_operations


def count(args, batch_size, extra=0):
    """Count as Megatron does: one cost for a dense layer, another for an expert layer."""
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [int(number % frequency == 0) for number in range(args.num_layers)]
    assert len(frequency) == args.num_layers
    return batch_size * sum(100 if is_moe else 1 for is_moe in frequency) + extra


@pytest.mark.parametrize(
    "frequency, expected",
    # Layers 1, 2 and 4 are left.
    [(1, 300), ([0, 0, 1, 1, 0], 102), (2, 201), (99, 3)],
    ids=["all", "list", "every second", "first only"],
)
def test_reported_operations(frequency, expected):
    args = SimpleNamespace(num_layers=5, moe_layer_freq=frequency)
    left = wrap_num_floating_point_operations(count, (0, 3))
    assert left(args, 2, extra=7) == 2 * expected + 7
    assert args.num_layers == 5 and args.moe_layer_freq == frequency


def test_model_without_experts():
    args = SimpleNamespace(num_layers=4)
    assert wrap_num_floating_point_operations(lambda a, b: a.num_layers * b, (1,))(args, 10) == 30


def test_the_output_is_a_copy_of_the_input():
    """Pipeline schedules free the memory of a stage's output, and read its input again."""
    layer = NoopLayer(SimpleNamespace(), layer_number=1, global_number=4)
    x = torch.randn(3, 2, requires_grad=True)
    out, context = layer(x, attention_mask=None)
    assert torch.equal(out, x) and out.data_ptr() != x.data_ptr() and context is None
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 2)) and layer.layer_number == 4
    assert not list(layer.parameters())
