"""Zero bubble: the training of 1F1B in every bit, and a third of its bubble."""

from dataclasses import replace

import pytest
import torch

import mindspeed
from tests.gpt.layout import Layout
from tests.gpt.turns import idle, most_unfinished
from tests.ranks import run_ranks

ZB = {"schedules_method": "zb-h1"}
STEPS = 2
CLIP = 0.01
UNIT = {"F": 1, "B": 1, "W": 1}
FOUR_STAGES = Layout(pp=4, micro_batch=1)
SHARDED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 1000}

LAYOUTS = [
    FOUR_STAGES,
    replace(FOUR_STAGES, family="llama", spec="te"),
    Layout(pp=2, dp=2, micro_batch=1, **SHARDED),
    Layout("llama", pp=2, tp=2, micro_batch=1, sequence_parallel=True),
    Layout("llama", pp=2, tp=2, spec="te", micro_batch=1, sequence_parallel=True),
    Layout("experts", pp=2, dp=2, spec="te", bf16=True, micro_batch=1, **SHARDED),
    Layout("experts", pp=2, dp=2, micro_batch=1),
    Layout(pp=2, dp=2, micro_batch=1, dropout=0.1, recompute=("full", "uniform", 1)),
]


def _train(layout, features):
    from megatron.core import parallel_state

    from tests.gpt.training import Training
    from tests.gpt.turns import recorded_turns

    parallel_state.destroy_model_parallel()
    mindspeed.enable(**features)
    training = Training(layout)
    for each in getattr(training.optimizer, "chained_optimizers", [training.optimizer]):
        each.config.clip_grad = CLIP
    with recorded_turns() as turns:
        steps = [training.step()]
    steps += [training.step() for _ in range(STEPS - 1)]
    weights = {shard.name: shard.values for shard in training.weights()}
    return turns, steps, training.gradients(), weights


def _both(layouts):
    """Train each layout by 1F1B and by zero bubble, in one group of ranks."""
    return [(_train(layout, {}), _train(layout, ZB)) for layout in layouts]


def _only(kinds, turns):
    return [turn for turn in turns if turn[0] in kinds]


@pytest.fixture(scope="module")
def outcomes():
    ranks = run_ranks(_both, 4, LAYOUTS, timeout=500)
    return {layout: [rank[i] for rank in ranks] for i, layout in enumerate(LAYOUTS)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_is_that_of_1f1b_in_every_bit(outcomes, layout):
    """With gradients that are clipped, so that their norm matters."""
    for plain, ours in outcomes[layout]:
        assert ours[1] == plain[1]
        assert min(norm for _, norm in plain[1]) > CLIP
        for mine, expected in zip(ours[2:], plain[2:], strict=True):
            assert mine.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_micro_batch_has_its_weight_gradients_once(outcomes, layout):
    for plain, ours in outcomes[layout]:
        assert _only("FB", ours[0]) == _only("FB", plain[0])
        done = [number for kind, number in ours[0] if kind == "W"]
        assert done == list(range(layout.micro_batches))


def test_the_bubble_falls_to_a_third(outcomes):
    """Of 1F1B, whose backward is B and W at once."""
    plain, ours = zip(*outcomes[FOUR_STAGES], strict=True)
    assert FOUR_STAGES.micro_batches == 8
    before = idle([_only("FB", stage[0]) for stage in plain], {"F": 1, "B": 2})
    assert before == [9, 9, 9, 9]
    after = idle([_only("FBW", stage[0]) for stage in ours], UNIT)
    assert sum(after) <= 0.4 * sum(before)
    assert after == [3, 3, 3, 3]


def test_no_stage_keeps_more_than_the_first_of_1f1b(outcomes):
    for stage, (plain, ours) in enumerate(outcomes[FOUR_STAGES]):
        assert most_unfinished(plain[0], "B") == most_unfinished(ours[0], "B") == 4 - stage
        assert most_unfinished(ours[0], "W") <= 4


def test_buckets_are_reduced_behind_the_last_weight_gradient(outcomes):
    for layout in LAYOUTS:
        for _, ours in outcomes[layout]:
            kinds = [kind for kind, _ in ours[0]]
            first_reduction = kinds.index("R")
            assert "W" in kinds[:first_reduction]
            assert set(kinds[first_reduction:]) == {"R"}
