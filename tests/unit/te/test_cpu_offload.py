"""Offloading on cpu is a pass-through; which tensors would move is decided here."""

import inspect

import pytest
import torch

from mindspeed.te.pytorch.cpu_offload import OffloadContext, get_cpu_offload_context


def test_cpu_passes_through_with_equal_gradients():
    context, next_layer = get_cpu_offload_context(True, 1, 2, True, False, False)
    grads = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8) for _ in range(2)]
        x = torch.randn(4, 8, requires_grad=True)
        out = x
        for layer in layers:
            if offloaded:
                with context:
                    assert context.inside_context
                    out = layer(out).sin()
                assert not context.inside_context
                out = next_layer(out)
            else:
                out = layer(out).sin()
        out.sum().backward()
        grads.append([x.grad, *(p.grad for layer in layers for p in layer.parameters())])
    for given, true in zip(*grads):
        assert torch.equal(given, true)


@pytest.mark.parametrize("arguments", [5, 6])
def test_every_megatron_arity_is_served(arguments):
    given = (False, 1, 4, True, True, False)[:arguments]
    context, next_layer = get_cpu_offload_context(*given)
    x = torch.ones(1)
    with context:
        assert next_layer(x) is x
    assert "retain_pinned_cpu_buffers" in inspect.signature(get_cpu_offload_context).parameters


def test_offloading_nothing_is_an_error():
    with pytest.raises(ValueError, match="set cpu_offloading_activations=True"):
        get_cpu_offload_context(True, 1, 4, False, False)


def test_weight_offloading_is_said_to_have_no_effect(caplog):
    get_cpu_offload_context(True, 1, 4, True, True)
    assert "cpu_offloading_weights has no effect" in caplog.text


def test_layers_are_counted_over_iterations():
    context = OffloadContext(num_layers=2, model_layers=3)
    moved = []
    for _ in range(2):
        for _ in range(3):
            moved.append(context.layer_is_offloaded())
            context.next_layer(torch.ones(1))
    assert moved == [True, True, False] * 2
