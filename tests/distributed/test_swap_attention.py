"""Swapped attention in a whole model, with copies as late as they may be: the same in every bit."""

from dataclasses import replace

import pytest
import torch

import mindspeed
from tests.gpt.layout import GLOBAL_BATCH, HEADS, HIDDEN, SEQUENCE, Layout
from tests.gpt.runs import assert_same_weights
from tests.ranks import run_ranks

GPT = Layout(dropout=0.1)
LLAMA = Layout("llama", spec="te")
ALL = ("input_norm", "self_attention", "post_attention_norm")
RECOMPUTE = {"recompute_norm": True, "recompute_activation_function": True}


def _train(layout, features, swaps):
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from mindspeed.memory.swap_attention import swap_block
    from tests.delayed_copies import delayed_swapper
    from tests.gpt import training as module

    mindspeed.enable(swap_attention=swaps, **features)
    training = module.Training(layout)
    swappers = []
    for chunk in training.chunks if swaps else ():
        swappers.append(delayed_swapper())
        swap_block(chunk.decoder, ALL, swappers[-1])
    losses = []
    for _ in range(3):
        losses.append(training.forward_backward())
        training.update()
        get_forward_backward_func()(  # an evaluation between the steps
            forward_step_func=module._forward_step,
            data_iterator=[training._data() for _ in training.wrapped],
            model=training.wrapped,
            num_microbatches=layout.micro_batches,
            seq_length=module.SEQUENCE,
            micro_batch_size=layout.micro_batch,
            forward_only=True,
        )
    return losses, training.gradients(), [swapper.to_device.count for swapper in swappers]


@pytest.mark.parametrize(
    ("layout", "features"),
    [
        (GPT, {}),
        (LLAMA, {"use_fused_residual_norm": True}),
        (LLAMA, RECOMPUTE),
        (replace(GPT, recompute=("full", "block", 1)), RECOMPUTE),
        (replace(LLAMA, tp=2, sequence_parallel=True), {}),
        (replace(GPT, pp=2), {}),
        (replace(LLAMA, pp=2, layers_per_virtual_stage=1), {"recompute_norm": True}),
    ],
    ids=str,
)
def test_training_is_the_same_in_every_bit(layout, features):
    plain, ours = (
        run_ranks(_train, layout.world, layout, features, swaps) for swaps in (False, True)
    )
    for (losses, gradients, _), (found, ours_gradients, counts) in zip(plain, ours, strict=True):
        assert found == losses
        assert_same_weights(ours_gradients, gradients)
        # Of a stage of one layer, the last region is the only one and need not come back.
        assert layout.pp > 1 or all(counts)


def _bytes(swaps):
    """Return the bytes that autograd keeps on the device, and those that a swapper took."""
    from mindspeed.memory.swap_attention import swap_block
    from tests.delayed_copies import delayed_swapper
    from tests.gpt.saved import SavedTensors
    from tests.gpt.training import Training

    mindspeed.enable(swap_attention=True)
    training = Training(replace(LLAMA, micro_batch=GLOBAL_BATCH))
    swapper = delayed_swapper()
    if swaps:
        swap_block(training.chunks[0].decoder, ALL, swapper)
    found = []
    with SavedTensors(training.chunks[0].parameters()) as saved:
        hook = training.wrapped[0].register_forward_hook(lambda *_: found.append(saved.kept()))
        training.forward_backward()
        hook.remove()
    return sum(kept.bytes for kept in found[0]), swapper.buffers.total_bytes


def test_what_attention_saves_is_on_the_host():
    """Queries, keys, values and outputs at least; hooks around a region see what it leaves."""
    (before, _), (after, host) = (run_ranks(_bytes, 1, swaps)[0] for swaps in (False, True))
    groups = 2
    elements = 2 * HIDDEN + 2 * groups * HIDDEN // HEADS
    attention = LLAMA.num_layers * 4 * SEQUENCE * GLOBAL_BATCH * elements
    assert before - after >= attention
    assert attention <= host < before  # with the norm before the first linear, in and out


def test_on_a_cpu_the_switch_changes_nothing():
    plain, ours = (run_ranks(_plain, 1, swaps)[0] for swaps in (False, True))
    assert_same_weights(ours, plain)


def _plain(swaps):
    from tests.gpt.training import Training

    mindspeed.enable(swap_attention=swaps)
    training = Training(LLAMA)
    assert not any(hasattr(m, "swapped") for m in training.chunks[0].modules())
    training.step()
    return training.gradients()


def _taken():
    """Return whether norms are still taken from residual sums, inside of regions."""
    from mindspeed.memory.swap_attention import swap_block
    from tests.delayed_copies import delayed_swapper
    from tests.gpt.training import Training

    mindspeed.enable(swap_attention=True, use_fused_residual_norm=True)
    training = Training(LLAMA)
    block = training.chunks[0].decoder
    swap_block(block, ("self_attention",), delayed_swapper())
    taken = []
    for one in block.residual_norms:
        original = one.take
        one.take = lambda x, original=original: taken.append(original(x)) or taken[-1]
    training.forward_backward()
    return [value is not None for value in taken]


@pytest.mark.skipif(torch.__version__ < "2.8", reason="torch 2.7 shows no saved-tensor hooks")
def test_norms_still_come_with_the_sum_before_them():
    taken = run_ranks(_taken, 1)[0]
    assert taken and all(taken)
