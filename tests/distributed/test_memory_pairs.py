"""Every pair of memory features that goes together trains as without those that are exact."""

from dataclasses import replace

import pytest

import mindspeed
from tests import memory_pairs
from tests.gpt.layout import Layout
from tests.memory_pairs import ONLY_ASKED, pairs, refusal, together
from tests.ranks import run_ranks

LLAMA = Layout("llama", num_layers=2, bf16=True, spec="te")
# Sums over tiles are rounded otherwise: a pair is compared with its tiled feature alone.
ROUNDED = ("tiled MLP", "tiled loss")
# Two of Megatron's own need four ranks and are tested without us.
UNTRAINED = ("distributed optimizer", "pipeline")
ALLOWED = [
    pair
    for pair in pairs()
    if pair != UNTRAINED and not {*pair} & {*ONLY_ASKED} and refusal(*pair) is None
]
SPLIT = {"pipeline": {"pp": 2}, "distributed optimizer": {"dp": 2, "distributed_optimizer": True}}


def _layout(names):
    layout = LLAMA
    for name in names:
        layout = replace(layout, **SPLIT.get(name, {}))
    return layout


def _train(layout, switch):
    """Return losses, gradient norms and fingerprints of two steps, with late copies."""
    from mindspeed.memory.swap_attention import swap_block
    from mindspeed.memory.swap_layer_input import SwappedInputs
    from mindspeed.optim.host_state import HostState
    from tests.delayed_copies import DelayedCopies, delayed_swapper
    from tests.gpt.runs import _fingerprint
    from tests.gpt.training import Training, destroy_groups

    mindspeed.enable(**switch.options)
    recompute = ("granularity", "method", "num_layers")
    values = tuple(switch.megatron.get(f"recompute_{name}") for name in recompute)
    training = Training(replace(layout, recompute=values if values[0] else None))
    for chunk in training.chunks:
        if "swap_attention" in switch.options:
            swap_block(chunk.decoder, ("self_attention",), delayed_swapper())
        if "swap_layer_input" in switch.options:
            chunk.decoder.swapped_inputs = SwappedInputs(delayed_swapper())
    if "swap_optimizer" in switch.options:
        for part in getattr(training.optimizer, "chained_optimizers", [training.optimizer]):
            part.optimizer.host = HostState(3000, DelayedCopies(False), DelayedCopies(True))
    found = [(*training.step(), _fingerprint(training)) for _ in range(2)]
    destroy_groups()
    return found


def _train_all(cases):
    """Train every pair, and what it has to equal once for all pairs."""
    expected, found = {}, []
    for names in cases:
        layout, kept = _layout(names), tuple(name for name in names if name in ROUNDED)
        if (layout, kept) not in expected:
            expected[layout, kept] = _train(layout, together(*kept))
        found.append((_train(layout, together(*names)), expected[layout, kept]))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_pairs_train_the_same_in_every_bit(world):
    cases = [pair for pair in ALLOWED if _layout(pair).world == world]
    assert len(cases) > 15
    for rank in run_ranks(_train_all, world, cases, timeout=300):
        wrong = [names for names, (ours, plain) in zip(cases, rank, strict=True) if ours != plain]
        assert wrong == []


def test_refusals_are_one_line_that_names_both():
    refused = [text for pair in pairs() if (text := refusal(*pair)) is not None]
    assert len(refused) > 8
    assert all("\n" not in text and text.count("--") >= 2 for text in refused)


def test_the_page_is_what_the_features_say():
    assert memory_pairs.PAGE.read_text(encoding="utf-8") == memory_pairs.page()
