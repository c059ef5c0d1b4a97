"""Checkpoints that are recomputed ahead: the outermost ones, each once."""

import torch

import mindspeed.megatron_adaptor  # noqa: F401  # before Megatron, as in a user's script
from mindspeed.parallel.pipeline import recompute_ahead


def test_a_checkpoint_inside_of_another_is_not_run_ahead():
    """Its outer one computes it again; run by itself it would be work that nothing reads."""
    calls = []

    def plain(function, distribute_saved_activations, *args):
        calls.append(torch.is_grad_enabled())
        return function(*args)

    checkpoint = recompute_ahead.wrap_checkpoint(plain)

    def layer(x):
        return checkpoint(torch.sin, False, x) * x

    step = recompute_ahead.Step([0], most_kept=None)
    token = recompute_ahead._step.set(step)
    try:
        forward = step.begin_forward(0)
        x = torch.tensor([0.3, 0.7], requires_grad=True)
        out = checkpoint(layer, False, x)
        step.current = None
    finally:
        recompute_ahead._step.reset(token)
    assert len(forward.checkpoints) == 1 and calls == [False]
    forward.recompute()
    out.sum().backward()
    assert torch.allclose(x.grad, x.cos() * x + x.sin())
