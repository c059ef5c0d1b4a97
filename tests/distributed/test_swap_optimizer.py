"""Optimizer state on the host, copied as late as may be: the same training, the same files."""

from dataclasses import replace

import torch

import mindspeed
from tests.gpt.layout import Layout
from tests.gpt.runs import assert_same_weights
from tests.ranks import run_ranks

PLAIN = Layout("llama", num_layers=2, bf16=True, spec="te")
SHARDED = replace(PLAIN, dp=2, distributed_optimizer=True)
CHUNK = 3000  # bytes: matrices are cut, and norms share a chunk


def _start(layout, swaps, late=True, **features):
    """Start a training, with late copies where it swaps."""
    from megatron.core import parallel_state

    from mindspeed.optim.host_state import HostState
    from tests.delayed_copies import DelayedCopies
    from tests.gpt.training import Training

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    mindspeed.enable(swap_optimizer=swaps, **features)
    training = Training(layout)
    for adam in _adams(training) if swaps and late else ():
        adam.host = HostState(CHUNK, DelayedCopies(False), DelayedCopies(True))
    return training


def _adams(training):
    parts = getattr(training.optimizer, "chained_optimizers", [training.optimizer])
    return [part.optimizer for part in parts]


def _steps(training, count):
    results = [training.step() for _ in range(count)]
    return results, {shard.name: shard.values for shard in training.weights()}


def _off_host_bytes(training):
    """Return the bytes of state that are not in memory of the host state, and the others."""
    off, on = 0, 0
    for adam in _adams(training):
        for state in adam.state.values():
            for tensor in state.values():
                if tensor.untyped_storage()._cdata in adam.host._owned:
                    on += tensor.nbytes
                else:
                    off += tensor.nbytes
    return off, on


def _train(cases):
    """Train each case plain and swapped; return both, and the swapped bytes."""
    found = []
    for layout, features in cases:
        plain = _steps(_start(layout, False, **features), 3)
        training = _start(layout, True, **features)
        ours, count = _steps(training, 3), sum(p.numel() for p in training.chunks[0].parameters())
        found.append((plain, ours, _off_host_bytes(training), count))
        copies = [adam.host._to_host.count for adam in _adams(training)]
        assert all(count > 20 for count in copies)
    return found


ONE_RANK = [
    (PLAIN, {}),
    (replace(PLAIN, bf16=False), {}),
    (PLAIN, {"reuse_fp32_param": True}),
]
TWO_RANKS = [
    (SHARDED, {}),
    (replace(SHARDED, overlap_grad_reduce=True, overlap_param_gather=True), {}),
    (replace(SHARDED, bf16=False), {}),
    (replace(PLAIN, tp=2), {}),
]


def _check(ranks, cases):
    for rank in ranks:
        for (plain, ours, (off, on), count), (layout, _) in zip(rank, cases, strict=True):
            assert ours[0] == plain[0]
            assert_same_weights(ours[1], plain[1])
            assert off == 0 and on > 0
            if layout.dp == 1 == layout.tp:
                # Two moments, and the half of a master that a bfloat16 weight lacks.
                assert on == (10 if layout.bf16 else 8) * count


def test_training_is_the_same_in_every_bit_on_one_rank():
    _check(run_ranks(_train, 1, ONE_RANK), ONE_RANK)


def test_training_is_the_same_in_every_bit_on_two_ranks():
    _check(run_ranks(_train, 2, TWO_RANKS), TWO_RANKS)


def _cross(layout, folder):
    """Save after two steps with and without, resume both ways; return the four continuations."""
    from pathlib import Path

    from tests.gpt import checkpoint

    found = {}
    for saves in (False, True):
        training = _start(layout, saves)
        _steps(training, 2)
        path = Path(folder, str(saves))
        path.mkdir(exist_ok=True)
        torch.distributed.barrier()
        checkpoint.save(training, str(path))
    for saves in (False, True):
        for loads in (False, True):
            training = _start(layout, loads)
            checkpoint.load(training, str(Path(folder, str(saves))))
            found[saves, loads] = _steps(training, 2)
            if loads:
                assert _off_host_bytes(training)[0] == 0
    return found


def _check_crossed(ranks):
    for found in ranks:
        expected = found[False, False]
        assert len({loss for loss, _ in expected[0]}) == 2
        for results, weights in found.values():
            assert results == expected[0]
            assert_same_weights(weights, expected[1])


def test_checkpoints_do_not_show_where_state_was(tmp_path):
    _check_crossed(run_ranks(_cross, 1, PLAIN, str(tmp_path)))


def test_sharded_checkpoints_do_not_show_where_state_was(tmp_path):
    _check_crossed(run_ranks(_cross, 2, SHARDED, str(tmp_path)))


def test_a_missing_wait_shows():
    assert run_ranks(_with_faults, 1)[0] == {"arrive": False, "leave": False, "none": True}


def _with_faults():
    """Return for each fault whether training is still the same."""
    plain = _steps(_start(PLAIN, False), 3)[0]  # the third shows the state of the first
    same = {}
    for fault in ("arrive", "leave", "none"):
        training = _start(PLAIN, True)
        for adam in _adams(training):
            if fault == "arrive":
                adam.host._to_device.wait = lambda event: None
            if fault == "leave":
                adam.host._release = lambda staged: staged.states.clear()
        same[fault] = _steps(training, 3)[0] == plain
    return same
