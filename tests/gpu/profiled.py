"""Run a script of Megatron's kind and write down the large torch operators of its third step.

python -m tests.gpu.profiled OUT SIZE SCRIPT [arguments]: OUT gets {operator: calls}, of those whose
first input has at least SIZE elements, in all its tensors where it is a list of them.
"""

import json
import runpy
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import mindspeed.megatron_adaptor  # noqa: F401  # isort: skip
import torch
from megatron.core.distributed import DistributedDataParallel

STEP = 3


def main() -> None:
    """A step begins where Megatron's data parallelism zeroes its gradients."""
    out, size = Path(sys.argv[1]), int(sys.argv[2])
    profiler = recorder()
    steps, zero = Counter(), DistributedDataParallel.zero_grad_buffer

    def zero_grad_buffer(self: DistributedDataParallel) -> None:
        steps["begun"] += 1
        if steps["begun"] == STEP:
            profiler.start()
        if steps["begun"] == STEP + 1:
            profiler.stop()
            out.write_text(json.dumps(large_operators(profiler, size)))
        zero(self)

    DistributedDataParallel.zero_grad_buffer = zero_grad_buffer  # type: ignore[method-assign]
    sys.argv = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def recorder() -> torch.profiler.profile:
    """Return a profiler of operators and their inputs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, record_shapes=True)


def large_operators(profiler: torch.profiler.profile, size: int) -> Counter[str]:
    """Count the operators whose first input has at least `size` elements."""
    # The events of the public interface have no shapes of tensors in lists.
    results: Any = profiler.profiler
    tree = results.kineto_results.experimental_event_tree()
    operators = [event for event in _walk(tree) if event.tag.name == "TorchOp"]
    return Counter(event.name for event in operators if _first_size(event) >= size)


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


def _first_size(event: Any) -> int:
    for value in event.extra_fields.inputs:
        tensors = value if isinstance(value, list) else [value]
        sizes = [tensor.sizes for tensor in tensors if hasattr(tensor, "sizes")]
        if any(sizes):
            return sum(map(prod, sizes))
    return 0


if __name__ == "__main__":
    main()
