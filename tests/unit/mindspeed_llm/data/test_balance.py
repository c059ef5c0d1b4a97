"""Steps of packed rows whose ranks have about equal attention."""

import numpy as np
import pytest

from mindspeed_llm.data.context_split import ContextSplit
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.packing import plan_rows
from mindspeed_llm.data.shuffle import BalancedOrder, SampleOrder
from mindspeed_llm.data.stream import MicroBatches, Part, SampleStream
from tests.unit.mindspeed_llm.data.real_lengths import num_pairs, real_lengths
from tests.unit.mindspeed_llm.training.tiny_run import make_samples, write_samples

CP, DP, STEP = 4, 4, 8


@pytest.mark.parametrize("length", [4096, 16384])
def test_ranks_differ_by_at_most_a_tenth_on_real_lengths(length):
    """Pairs of tokens that each of 4 x 4 ranks computes, in every step of two epochs."""
    lengths = real_lengths(length)
    rows = plan_rows(lengths, length)
    bounds = [np.concatenate(([0], np.cumsum(lengths[row]))).tolist() for row in rows]
    pairs = np.array([[num_pairs(row, ContextSplit(CP, r)) for r in range(CP)] for row in bounds])
    works = np.array([(lengths[row] ** 2.0).sum() for row in rows])
    balanced = _differences(BalancedOrder(works, STEP), pairs)
    assert balanced.max() <= 1.1, balanced.max()
    shuffled = _differences(SampleOrder(len(works)), pairs)
    assert np.median(shuffled) > 1.2, "nothing to balance"


def _differences(order, pairs):
    """Return, for each step, the most work of a rank over the least."""
    steps = 2 * order.epoch_size // STEP
    rows = np.array([order[position] for position in range(steps * STEP)])
    works = pairs[rows].reshape(steps, STEP // DP, DP * CP).sum(1)
    return works.max(1) / works.min(1)


def test_every_sample_is_seen_and_epochs_differ():
    works = np.random.default_rng(0).random(21)
    order = BalancedOrder(works, 4)
    assert order.epoch_size == 24
    epochs = [[order[p + 24 * epoch] for p in range(24)] for epoch in range(2)]
    assert set(epochs[0]) == set(epochs[1]) == set(range(21)) and epochs[0] != epochs[1]
    few = BalancedOrder(works[:3], 8)
    assert {few[p] for p in range(8)} == {0, 1, 2}


def test_the_samples_of_a_pair_go_to_one_rank():
    order = BalancedOrder(np.arange(8.0), 8, shuffle=False)
    stream = [order[position] for position in range(8)]
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            batches = MicroBatches(stream, size=1, rank=rank, world=ranks)
            taken = [next(batches)[0] for _ in range(8 // ranks)]
            assert sum(taken) == 7 * len(taken) / 2


def test_streams_know_the_attention_of_rows(tmp_path):
    samples, rows = make_samples(6), [[0, 1, 2], [3], [4, 5]]
    lengths = np.array([len(ids) for ids, _ in samples], float)
    packed = InstructionData(write_samples(tmp_path / "packed", samples, rows))
    assert packed.works.tolist() == [(lengths[row] ** 2).sum() for row in rows]
    separate = InstructionData(write_samples(tmp_path / "separate", samples))
    assert separate.works.tolist() == (lengths**2).tolist()
    stream = SampleStream([Part(separate, 0.0, 1.0)], balanced_step=2)
    sizes = [len(stream[position]["input_ids"]) for position in range(6)]
    assert sorted(sizes) == sorted(lengths)
    pairs = [sizes[position : position + 2] for position in (0, 2, 4)]
    assert sorted(lengths)[::5] in [sorted(pair) for pair in pairs]
