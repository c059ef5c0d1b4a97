"""Residual sums that compute the next norm train a GPT to the same bits as sums that do not."""

import functools
import os
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.gpt.layout import Layout
from tests.ranks import run_ranks

LLAMA = Layout("llama", num_layers=2, spec="te")
FULL = ("full", "uniform", 1)


def _train(layout, is_on, modules=()):
    """Return losses, gradients, and how many norms were computed with their sum."""
    import mindspeed
    from mindspeed.te.pytorch.module import layernorm

    mindspeed.enable(use_fused_residual_norm=is_on)
    together = []
    plain = layernorm.plain_add_rms_norm

    def counted(*args):
        together.append(1)
        return plain(*args)

    layernorm.plain_add_rms_norm = counted
    from tests.gpt import training as gpt

    if modules:
        config = gpt.transformer_config(layout)
        config = replace(config, recompute_granularity="selective", recompute_modules=modules)
        gpt.transformer_config = lambda _: config
    training = gpt.Training(layout)
    losses = [training.step()[0] for _ in range(2)]
    return losses, training.gradients(), len(together)


def _both(layout, modules=()):
    unfused, fused = (run_ranks(_train, layout.world, layout, on, modules) for on in (False, True))
    for (losses, gradients, none), (same, others, _) in zip(unfused, fused, strict=True):
        assert losses == same
        assert not none
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            assert torch.equal(gradient, others[name]), name
    return fused[0][2]


@pytest.mark.parametrize(
    "layout",
    [
        LLAMA,
        replace(LLAMA, bf16=True),
        replace(LLAMA, tp=2, sequence_parallel=True),
        replace(LLAMA, dp=2, overlap_grad_reduce=True),
        replace(LLAMA, recompute=("selective", None, None)),
    ],
    ids=str,
)
def test_same_bits_with_every_norm_but_the_first_computed_by_a_sum(layout):
    sums = 2 * layout.num_layers
    assert _both(layout) == 2 * layout.micro_batches * sums


def test_the_last_sum_of_a_stage_computes_no_norm():
    layout = replace(LLAMA, pp=2)
    assert _both(layout) == 2 * layout.micro_batches


@pytest.mark.parametrize(("modules", "sums"), [(["mlp"], 2), (["core_attn", "layernorm"], 4)])
def test_same_bits_when_parts_of_a_layer_are_recomputed(modules, sums):
    """A norm inside of recompute is not computed by a sum outside: its gradient comes twice."""
    layout = replace(LLAMA, dp=2, overlap_grad_reduce=True, bucket_size=2000)
    assert _both(layout, modules) == 2 * layout.micro_batches * sums


def test_same_bits_when_some_layers_are_recomputed():
    layout = replace(
        LLAMA, dp=2, overlap_grad_reduce=True, bucket_size=2000, recompute=("full", "block", 1)
    )
    assert _both(layout) == 2 * layout.micro_batches * 2


@pytest.mark.parametrize(
    "layout",
    [
        replace(LLAMA, recompute=FULL),
        replace(LLAMA, dropout=0.1),
        replace(
            LLAMA,
            dp=2,
            distributed_optimizer=True,
            overlap_param_gather=True,
            overlap_grad_reduce=True,
        ),
        replace(LLAMA, spec="local"),
        Layout(num_layers=2, spec="te"),
    ],
    ids=str,
)
def test_sums_are_made_alone_where_no_norm_follows(layout):
    assert _both(layout) == 0


def _scaled(module, args, output):
    return output[0] * 1.5, *output[1:]


def _hooked(model):
    model.decoder.layers[0].register_forward_hook(_scaled)


def _recompute(layer, use_reentrant):
    plain = layer.forward

    def forward(hidden_states, **rest):
        rest = functools.partial(plain, **rest)
        return checkpoint(rest, hidden_states, use_reentrant=use_reentrant)

    layer.forward = forward


def _checkpointed(use_reentrant):
    return lambda model: _recompute(model.decoder.layers[0], use_reentrant)


PREPARED = {
    "experts": ("te", "gated experts", None),
    "a hook that replaces a sum": ("te", "llama", _hooked),
    "recompute that Megatron does not know of": ("te", "llama", _checkpointed(False)),
    "reentrant recompute": ("te", "llama", _checkpointed(True)),
}


def _compare(name):
    import mindspeed
    from tests.distributed.te_model import build, gradients, step

    spec, shape, prepare = PREPARED[name]
    options = {"normalization": "RMSNorm"} if shape == "gated experts" else {}
    results = []
    for is_on in (False, True):
        mindspeed.enable(use_fused_residual_norm=is_on)
        model = build(spec, shape, **options)
        if prepare is not None:
            prepare(model)
        results.append((step(model), gradients(model)))
    kinds = {type(layer.mlp_bda).__name__ for layer in model.decoder.layers}
    return results, kinds


@pytest.mark.parametrize("name", PREPARED)
def test_same_gradients_whatever_happens_to_a_sum(name):
    ((plain, fused), kinds) = run_ranks(_compare, 1, name)[0]
    assert kinds == {"AddWithNorm"}
    assert torch.equal(plain[0], fused[0])
    for parameter, gradient in plain[1].items():
        assert torch.equal(gradient, fused[1][parameter]), parameter


def _train_recomputed(layout, is_on, use_reentrant, layers):
    """Train with torch's checkpoint around single layers, and the kernels of a GPU."""
    os.environ["TRITON_INTERPRET"] = "1"
    import mindspeed
    from mindspeed.ops.norm import triton_impl
    from mindspeed.te.pytorch.module import layernorm
    from tests.gpt.training import Training

    layernorm.plain_rms_norm = triton_impl.rms_norm
    layernorm.plain_add_rms_norm = triton_impl.add_rms_norm
    mindspeed.enable(use_fused_residual_norm=is_on)
    training = Training(layout)
    for layer in training.chunks[0].decoder.layers[layers]:
        _recompute(layer, use_reentrant)
    losses = [training.step()[0] for _ in range(2)]
    return losses, training.gradients()


@pytest.mark.parametrize("layers", [slice(None), slice(1, 2)], ids=["each", "second"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "by saved tensors"])
def test_recompute_of_single_layers_while_gradients_are_reduced(use_reentrant, layers):
    """A norm that recompute does not read would report its weight's gradient twice."""
    layout = replace(LLAMA, dp=2, overlap_grad_reduce=True, bucket_size=2000)
    plain, fused = (
        run_ranks(_train_recomputed, 2, layout, is_on, use_reentrant, layers)
        for is_on in (False, True)
    )
    for (losses, gradients), (same, others) in zip(plain, fused, strict=True):
        assert losses == same
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-6, atol=1e-7, msg=name)


def _evaluate(spec, is_training):
    """Return losses without gradients, and how many norms were computed with their sum."""
    import mindspeed
    from mindspeed.te.pytorch.module import layernorm
    from tests.distributed.te_model import build, losses

    plain, results = layernorm.plain_add_rms_norm, []
    for is_on in (False, True):
        mindspeed.enable(use_fused_residual_norm=is_on)
        model, together = build(spec, "llama").train(is_training), []
        layernorm.plain_add_rms_norm = lambda *args, t=together: t.append(1) or plain(*args)
        with torch.no_grad():
            results.append(([losses(model) for _ in range(2)], len(together)))
    return results


@pytest.mark.parametrize("is_training", [False, True], ids=["evaluation", "training"])
def test_same_bits_in_an_evaluation(is_training):
    (plain, none), (fused, sums) = run_ranks(_evaluate, 1, "te", is_training)[0]
    assert none == 0 and sums == (0 if is_training else 2 * 2 * LLAMA.num_layers)
    assert all(torch.equal(one, other) for one, other in zip(plain, fused, strict=True))
