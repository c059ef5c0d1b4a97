"""Recomputed activation functions and norms: the same gradients in every bit, from fewer bytes."""

import functools
from dataclasses import replace

import pytest
import torch

import mindspeed
from tests.distributed import te_model
from tests.gpt.layout import FFN, HIDDEN, SEQUENCE, Layout
from tests.gpt.runs import assert_same_weights
from tests.ranks import run_ranks

ACTIVATION = {"recompute_activation_function": True}
NORM = {"recompute_norm": True}
FUSED = {"use_fused_swiglu": True, "use_fused_residual_norm": True}

GPT = Layout(dropout=0.1)
LLAMA = Layout("llama", spec="te")
_FLOAT = 4
_TOKENS = SEQUENCE * GPT.micro_batch
_ACTIVATION = _FLOAT * _TOKENS * FFN
_NORMS = 2 * _FLOAT * _TOKENS * HIDDEN


def _measure(layout, features, with_hooks=True):
    from tests.gpt.saved import kept_after_forward
    from tests.gpt.training import Training

    mindspeed.enable(**features)
    training = Training(layout)
    if not with_hooks:
        training.step()
        return 0, training.gradients()
    kept = sum(k.bytes for k in kept_after_forward(training) if k.dtype.is_floating_point)
    return kept, training.gradients()


@functools.cache
def _outcome(layout, *features):
    return run_ranks(_measure, layout.world, layout, dict(features))


def _assert_saved(layout, features, saving):
    plain, ours = _outcome(layout), _outcome(layout, *features.items())
    for (kept, gradients), (kept_before, expected) in zip(ours, plain, strict=True):
        assert kept_before - kept == saving
        assert_same_weights(gradients, expected)


@pytest.mark.parametrize(
    ("layout", "features", "saving"),
    [
        (GPT, ACTIVATION | NORM, 4 * (_ACTIVATION + _NORMS)),
        (GPT, ACTIVATION | {"recompute_activation_function_num_layers": 1}, _ACTIVATION),
        (GPT, NORM | {"recompute_norm_num_layers": 3}, 3 * _NORMS),
        (replace(GPT, spec="te"), ACTIVATION | NORM, 4 * (_ACTIVATION + _NORMS)),
        (LLAMA, ACTIVATION | NORM, 4 * (_ACTIVATION + _NORMS)),
        (replace(LLAMA, tp=2), ACTIVATION | NORM, 4 * (_ACTIVATION // 2 + _NORMS)),
        (
            replace(LLAMA, tp=2, sequence_parallel=True),
            ACTIVATION | NORM,
            4 * (_ACTIVATION + _NORMS) // 2,
        ),
        (replace(LLAMA, pp=2, layers_per_virtual_stage=1), NORM, _NORMS),
    ],
    ids=str,
)
def test_gradients_are_the_same_and_bytes_fall_as_predicted(layout, features, saving):
    _assert_saved(layout, features, saving)


@pytest.mark.parametrize(("whole", "num_layers", "expected"), [(1, None, 3), (2, 1, 1)])
def test_whole_layers_come_first(whole, num_layers, expected):
    """No layer is recomputed both as a whole and in parts."""
    layout = replace(GPT, recompute=("full", "block", whole))
    numbers = {}
    if num_layers is not None:
        numbers = {"recompute_activation_function_num_layers": num_layers}
        numbers |= {"recompute_norm_num_layers": num_layers}
    saving = expected * (_ACTIVATION + _NORMS)
    _assert_saved(layout, ACTIVATION | NORM | numbers, saving)


@pytest.mark.parametrize("overlap", [False, True])
def test_fused_paths_keep_their_gradients(overlap):
    """The norm that came with the residual sum is recomputed from the sum alone."""
    layout = replace(LLAMA, dp=2, overlap_grad_reduce=overlap, distributed_optimizer=overlap)
    plain, ours = (
        run_ranks(_measure, 2, layout, features, False)
        for features in (FUSED, FUSED | NORM | ACTIVATION)
    )
    for (_, gradients), (_, expected) in zip(ours, plain, strict=True):
        assert_same_weights(gradients, expected)


def _taken(features):
    """Return of each norm whether it took the result that its sum computed."""
    from tests.gpt.training import Training

    mindspeed.enable(**features)
    training = Training(replace(LLAMA, num_layers=2))
    norms = training.chunks[0].decoder.residual_norms
    taken = []
    for one in norms:
        original = one.take
        one.take = lambda x, original=original: taken.append(original(x)) or taken[-1]
    training.forward_backward()
    return [value is not None for value in taken]


def test_norms_still_come_with_the_sum_before_them():
    before, after = (run_ranks(_taken, 1, each)[0] for each in (FUSED, FUSED | NORM))
    assert before == after and all(after) and after


def _mixture(spec, features, shared):
    from tests.gpt.saved import SavedTensors

    mindspeed.enable(**features)
    options = {"moe_shared_expert_intermediate_size": shared} if shared else {}
    model = te_model.build(spec, "gated experts", **options)
    kept = []
    with SavedTensors(model.parameters()) as saved:
        hook = model.register_forward_hook(lambda *_: kept.append(saved.kept()))
        losses = te_model.step(model)
        hook.remove()
    found = sum(k.bytes for k in kept[0] if k.dtype.is_floating_point)
    # Unfused SwiGLU keeps silu(gate) and the gated value; newer releases add an offset to `up`.
    tensors = 2 + hasattr(model.config, "glu_linear_offset")
    return found, losses, te_model.gradients(model), tensors


@pytest.mark.parametrize(("spec", "shared"), [("te", 0), ("te grouped", 0), ("te", 40)])
def test_experts(spec, shared):
    before, losses, expected, tensors = run_ranks(_mixture, 1, spec, {}, shared)[0]
    after, found, gradients, _ = run_ranks(_mixture, 1, spec, ACTIVATION | NORM, shared)[0]
    assert torch.equal(losses, found)
    assert_same_weights(gradients, expected)
    # Two experts of width 24 see each token; what they return is also multiplied by probabilities.
    widths = 2 * 24 * (tensors + 1) + shared * tensors + 2 * te_model.HIDDEN
    tokens = te_model.SEQUENCE * te_model.BATCH
    assert before - after == te_model.LAYERS * _FLOAT * tokens * widths
