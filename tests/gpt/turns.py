"""In which order the stages of a pipeline run F, B and W, and how long they stand idle."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

Turn = tuple[str, int]
"""F (forward), B (gradients of activations) or W (of weights) of a micro-batch."""


@contextmanager
def recorded_turns() -> Iterator[list[Turn]]:
    """Record the turns of this rank, and R for each bucket whose reduction starts."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.pipeline_parallel import schedules

    from mindspeed.parallel.pipeline.zero_bubble import WeightGradientQueue

    log: list[Turn] = []
    with ExitStack() as stack:
        for owner, name, kind in (
            (schedules, "forward_step", "F"),
            (schedules, "backward_step", "B"),
            (WeightGradientQueue, "run_oldest", "W"),
            (_ParamAndGradBucketGroup, "start_grad_sync", "R"),
        ):
            watched = _watched(getattr(owner, name), kind, log)
            stack.enter_context(mock.patch.object(owner, name, watched))
        yield log


def _watched(original: Callable[..., Any], kind: str, log: list[Turn]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        value = original(*args, **kwargs)
        log.append((kind, sum(each == kind for each, _ in log)))
        return value

    return watched


def idle(stages: list[list[Turn]], costs: dict[str, float]) -> list[float]:
    """Return how long each stage stands idle until the last is done.

    A turn begins when the stage is free and its message is there; messages take no time.
    """
    ends: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * len(stages)
    left = [list(turns) for turns in stages]
    while any(left):
        before = sum(map(len, left))
        for stage, turns in enumerate(left):
            while turns:
                kind, number = turns[0]
                source = (kind, stage + {"F": -1, "B": 1}.get(kind, len(stages)), number)
                if 0 <= source[1] < len(stages) and source not in ends:
                    break
                begin = max(clocks[stage], ends.get(source, 0.0))
                clocks[stage] = ends[kind, stage, number] = begin + costs[kind]
                turns.pop(0)
        assert sum(map(len, left)) < before, "stages wait for each other"
    end = max(clocks)
    return [end - sum(costs[kind] for kind, _ in turns) for turns in stages]


def most_unfinished(turns: list[Turn], last: str) -> int:
    """Return how many micro-batches at most had gone forward and not through their `last` turn."""
    counts = [0]
    for kind, _ in turns:
        counts.append(counts[-1] + {"F": 1, last: -1}.get(kind, 0))
    return max(counts)
