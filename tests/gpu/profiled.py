"""Run a script of Megatron's kind and write down the large torch operators of its third step.

python -m tests.gpu.profiled OUT SIZE SCRIPT [arguments]: OUT gets {operator: calls}, of those whose
first input has at least SIZE elements.
"""

import json
import runpy
import sys
from collections import Counter
from math import prod
from pathlib import Path

import mindspeed.megatron_adaptor  # noqa: F401  # isort: skip
import torch
from megatron.core.distributed import DistributedDataParallel

OUT, SIZE = Path(sys.argv[1]), int(sys.argv[2])
STEP = 3


def main() -> None:
    """A step begins where Megatron's data parallelism zeroes its gradients."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    )
    steps, zero = Counter(), DistributedDataParallel.zero_grad_buffer

    def zero_grad_buffer(self: DistributedDataParallel) -> None:
        steps["begun"] += 1
        if steps["begun"] == STEP:
            profiler.start()
        if steps["begun"] == STEP + 1:
            profiler.stop()
            _write(profiler)
        zero(self)

    DistributedDataParallel.zero_grad_buffer = zero_grad_buffer  # type: ignore[method-assign]
    sys.argv = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _write(profiler: torch.profiler.profile) -> None:
    counts: Counter[str] = Counter()
    for event in profiler.events():
        shapes = [shape for shape in event.input_shapes or () if shape]
        if shapes and all(isinstance(n, int) for n in shapes[0]) and prod(shapes[0]) >= SIZE:
            counts[event.name] += 1
    OUT.write_text(json.dumps(counts))


main()
