"""A program that lets torch.compile trace the CUDA implementations, on a machine without a GPU.

`python -m tests.unit.ops.traced_kernels NAME...` prints the name of each that is one graph, on a
line of its own. Nothing is run: what is traced is not compiled any further.
"""

import sys
import traceback
from typing import Any

import torch
import torch.utils._triton

from mindspeed.ops.dispatch import REFERENCE, Op
from tests.unit.ops.exported_calls import BREAKS, CALLS, find


def targets() -> dict[str, str]:
    """Return the CUDA implementation of each operator that has one and promises not to break."""
    found: dict[str, str] = {}
    for name in CALLS:
        operator = find(name)
        if isinstance(operator, Op) and name not in BREAKS:
            choice = operator.choice("cuda")
            if choice.name != REFERENCE and choice.target not in found.values():
                found[name] = choice.target
    return found


class Traced(Exception):
    """Raised in place of running a graph."""


def trace(name: str) -> None:
    """Trace one operator as far as the graph goes."""
    operator = find(name)
    run = operator._build(operator.choice("cuda"))
    args, kwargs = CALLS[name]()

    def stop(*_: Any) -> Any:
        raise Traced

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args, **kwargs: run(*args, **kwargs), backend=lambda *_: stop, fullgraph=True
    )
    try:
        compiled(*args, **kwargs)
    except Traced:
        print(name)


def main(names: list[str]) -> None:
    """Trace the operators named."""
    torch.utils._triton.has_triton = lambda *_: True  # or kernels would be taken for functions
    for name in names:
        try:
            trace(name)
        except Exception:  # reported here, and by the line that is not printed
            traceback.print_exc()


if __name__ == "__main__":
    main(sys.argv[1:])
