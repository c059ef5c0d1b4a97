"""A GPT whose GEMMs compute SwiGLU trains as one whose GEMMs do not.

The kernels are stood in for by plain torch; sizes and float32 are let through, which they refuse.
"""

from dataclasses import replace

import pytest
import torch

import mindspeed
from mindspeed.config import ConfigError
from tests.gpt.layout import Layout
from tests.ranks import run_ranks
from tests.unit.ops import quack_stand_in

LLAMA = Layout("llama", num_layers=2, spec="te")


def _enable(is_on):
    """Switch it on or off, and return a list that grows with each GEMM that computes SwiGLU.

    It says whether the GEMM writes its pre-activation.
    """
    from mindspeed.ops.swiglu import gemm_swiglu

    quack_stand_in.install(pytest.MonkeyPatch())
    gemm_swiglu.MIN_TOKENS, gemm_swiglu.DTYPES = 1, (torch.float32,)
    mindspeed.enable(use_fused_swiglu=True, fuse_swiglu_gemm=is_on)
    trials = (
        gemm_swiglu._passes_trial(torch.float32, gemm_swiglu.TILES_N[0]),
        gemm_swiglu._passes_evaluation(torch.float32),
    )
    assert all(trials) or not is_on  # their own calls do not count
    import quack.gemm_interface as package

    calls, gated = [], package.gemm_gated
    package.gemm_gated = lambda *args, **options: (
        calls.append(options.get("store_preact", True)) or gated(*args, **options)
    )
    return calls


def _train(layout, is_on, prepare=None):
    from tests.gpt.training import Training

    calls = _enable(is_on)
    training = Training(layout)
    if prepare is not None:
        prepare(training.chunks[0])
    losses = [training.step()[0] for _ in range(2)]
    # What runs without gradients, in recompute's first run, writes no pre-activation.
    assert sum(calls) == len(calls) // (2 if layout.recompute else 1)
    return losses, training.gradients(), len(calls)


@pytest.mark.parametrize(
    ("layout", "times"),
    [
        (LLAMA, 1),
        (replace(LLAMA, tp=2), 1),
        (replace(LLAMA, tp=2, sequence_parallel=True), 1),
        (replace(LLAMA, pp=2), 0.5),
        (replace(LLAMA, recompute=("full", "uniform", 1)), 2),
        (replace(LLAMA, spec="local"), 0),
        (Layout(num_layers=2, spec="te"), 0),
    ],
    ids=str,
)
def test_same_losses_and_gradients(layout, times):
    plain, ours = (run_ranks(_train, layout.world, layout, is_on) for is_on in (False, True))
    for (losses, gradients, none), (same, others, count) in zip(plain, ours, strict=True):
        assert not none
        assert count == 2 * layout.micro_batches * layout.num_layers * times
        torch.testing.assert_close(same, losses, rtol=1e-6, atol=1e-6)
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=2e-5, atol=1e-6, msg=name)


class _Adapted(torch.nn.Module):
    """What an adapter does: a module around the linear that adds to its output."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        out, bias = self.base(x)
        return out * 1.5, bias


def _adapt(model):
    for layer in model.decoder.layers:
        layer.mlp.linear_fc1 = _Adapted(layer.mlp.linear_fc1)


def _hook(model):
    for layer in model.decoder.layers:
        layer.mlp.linear_fc1.register_forward_hook(lambda _, __, out: (out[0] * 1.5, out[1]))


def _hook_backward(model):
    for layer in model.decoder.layers:
        layer.mlp.linear_fc1.register_full_backward_hook(lambda *_: None)


def _watch(_):
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)


def _exchange(model):
    for layer in model.decoder.layers:
        forward = layer.mlp.linear_fc1.forward
        layer.mlp.linear_fc1.forward = lambda x, forward=forward: (forward(x)[0] * 1.5, None)


def _slip_in(model):
    """Change the output in a subclass, which no attribute of the module shows."""

    class Scaled(type(model.decoder.layers[0].mlp.linear_fc1)):
        def forward(self, x):
            out, bias = super().forward(x)
            return out * 1.5, bias

    for layer in model.decoder.layers:
        layer.mlp.linear_fc1.__class__ = Scaled


def _hook_second(model):
    for layer in model.decoder.layers:
        layer.mlp.linear_fc2.register_forward_hook(lambda _, __, out: (out[0] * 1.5, out[1]))


@pytest.mark.parametrize(
    "prepare", [_adapt, _hook, _hook_backward, _hook_second, _watch, _exchange, _slip_in]
)
def test_an_mlp_with_other_code_inside_stays_megatrons(prepare):
    plain, ours = (run_ranks(_train, 1, LLAMA, is_on, prepare)[0] for is_on in (False, True))
    losses, gradients, count = ours
    assert count == 0
    assert losses == plain[0]
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain[1][name]), name


def _scale_input(model):
    """Add hooks that run before a linear, as DDP's, and replace the input."""
    for layer in model.decoder.layers:
        layer.mlp.linear_fc1.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        layer.mlp.linear_fc2.register_forward_pre_hook(lambda _, args: args[0] * 0.5)
        layer.mlp.linear_fc2.register_forward_pre_hook(
            lambda _, args, kwargs: ((args[0] * 1.25,), kwargs), with_kwargs=True
        )


def test_hooks_before_a_linear_run_and_may_replace_its_input():
    plain, ours = (run_ranks(_train, 1, LLAMA, is_on, _scale_input)[0] for is_on in (False, True))
    losses, gradients, count = ours
    assert count == 2 * LLAMA.micro_batches * LLAMA.num_layers
    torch.testing.assert_close(losses, plain[0], rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain[1][name], rtol=2e-5, atol=1e-6, msg=name)


def test_without_the_package_it_is_refused():
    with pytest.raises(
        ConfigError, match=r"a Hopper GPU.* pip install 'quack-kernels\[cu13\]>=0.6.5,<0.7'"
    ):
        mindspeed.enable(use_fused_swiglu=True, fuse_swiglu_gemm=True)
