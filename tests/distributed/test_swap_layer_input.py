"""Inputs of recomputed layers on the host, copied as late as may be: the same in every bit."""

from dataclasses import replace

import mindspeed
from tests.distributed import context_model
from tests.gpt.layout import HEADS, HIDDEN, SEQUENCE, Layout
from tests.gpt.runs import assert_same_weights
from tests.ranks import run_ranks

GPT = Layout(dropout=0.1, recompute=("full", "uniform", 1))
LLAMA = Layout("llama", spec="te", recompute=("full", "block", 4))
HIDDEN_STATES = 4 * SEQUENCE * LLAMA.micro_batch * HIDDEN


def _all(cases):
    """Train each case plain, then swapped with late copies, in the same ranks."""
    from tests.gpt.training import destroy_groups

    results = []
    for layout, attention in cases:
        mindspeed.enable(swap_layer_input=True, swap_attention=attention)
        results.append([])
        for swaps in (False, True):
            results[-1].append(_train(layout, swaps, attention))
            destroy_groups()
    return results


def _train(layout, swaps, attention):
    from mindspeed.memory.swap_attention import swap_block
    from mindspeed.memory.swap_layer_input import SwappedInputs
    from tests.delayed_copies import delayed_swapper
    from tests.gpt.saved import SavedTensors
    from tests.gpt.training import Training

    training = Training(layout)
    swappers = [delayed_swapper() for _ in training.chunks]
    for chunk, swapper in zip(training.chunks, swappers) if swaps else ():
        chunk.decoder.swapped_inputs = SwappedInputs(swapper)
        if attention:
            swap_block(chunk.decoder, ("self_attention",), swapper)
    found, kept, hosts = [], [], []
    for _ in range(3):
        with SavedTensors(training.chunks[0].parameters()) as saved:
            hook = training.wrapped[0].register_forward_hook(lambda *_: kept.append(saved.kept()))
            found.append(training.forward_backward())
            hook.remove()
        training.update()
        evaluate(training)
        hosts.append([swapper.buffers.total_bytes for swapper in swappers])
        evaluate(training, has_gradients=True)
    copies = [swapper.to_device.count for swapper in swappers]
    return found, training.gradients(), sum(k.bytes for k in kept[0]), hosts, copies


def evaluate(training, has_gradients=False):
    """Run forward as Megatron-LM and our trainers do; or as a script that builds graphs for it."""
    import torch
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from tests.gpt import training as module

    with torch.set_grad_enabled(has_gradients):
        get_forward_backward_func()(
            forward_step_func=module._forward_step,
            data_iterator=[training._data() for _ in training.wrapped],
            model=training.wrapped,
            num_microbatches=training.layout.micro_batches,
            seq_length=module.SEQUENCE,
            micro_batch_size=training.layout.micro_batch,
            forward_only=True,
        )


ONE_RANK = [
    (LLAMA, False),
    (replace(GPT, recompute=("full", "uniform", 2)), False),
    (replace(LLAMA, recompute=("full", "block", 2)), True),
]
TWO_RANKS = [
    (replace(LLAMA, tp=2, sequence_parallel=True), False),
    (replace(GPT, pp=2), False),
    (replace(LLAMA, pp=2, layers_per_virtual_stage=1), False),
]


def _check_same(plain, ours, layout):
    assert ours[0] == plain[0]
    assert_same_weights(ours[1], plain[1])
    # Of a stage of one layer, the only region is the last one, which need not come back.
    assert all(ours[4]) or layout.layers_per_virtual_stage


def test_training_is_the_same_in_every_bit_and_hidden_states_leave_the_device():
    """Hooks outside of a region see what it leaves: neither inputs nor the rotary table."""
    (found,) = run_ranks(_all, 1, ONE_RANK)
    for (plain, ours), (layout, _) in zip(found, ONE_RANK, strict=True):
        _check_same(plain, ours, layout)
    (_, _, before, _, _), (_, _, after, hosts, _) = found[0]
    rotary = 4 * SEQUENCE * (HIDDEN // HEADS)
    assert before - after == LLAMA.num_layers * HIDDEN_STATES + rotary
    # The buffers of one micro-batch serve all of them, with an evaluation behind the step.
    whole = LLAMA.num_layers * HIDDEN_STATES
    assert LLAMA.micro_batches == 4 and hosts[0] == [whole]
    # A forward pass that builds a graph for no backward keeps it until the next one is done.
    assert hosts[1:] == [[2 * whole]] * 2


def test_tensor_and_pipeline_parallel_ranks():
    for rank in run_ranks(_all, 2, TWO_RANKS):
        for (plain, ours), (layout, _) in zip(rank, TWO_RANKS, strict=True):
            _check_same(plain, ours, layout)


def _split_sequences():
    """Return the losses of split and packed sequences: plain, and swapped with late copies."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    from mindspeed.memory.swap_layer_input import SwappedInputs
    from tests.delayed_copies import delayed_swapper

    mindspeed.enable(swap_layer_input=True)
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    full |= {"recompute_num_layers": 1}
    plain = [context_model.train(2, packed=p, steps=2, **full) for p in (False, True)]
    original, swappers = TransformerBlock.__init__, []

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        swappers.append(delayed_swapper())
        self.swapped_inputs = SwappedInputs(swappers[-1])

    TransformerBlock.__init__ = init
    ours = [context_model.train(2, packed=p, steps=2, **full) for p in (False, True)]
    return plain, ours, [swapper.to_device.count for swapper in swappers]


def test_split_and_packed_sequences():
    for plain, ours, copies in run_ranks(_split_sequences, 2):
        assert ours == plain and all(copies) and len(copies) == 2
