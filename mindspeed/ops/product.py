"""The product of two matrices: torch's, or by the cuBLAS algorithm that was fastest when tried.

cuBLAS takes the algorithm that its tables call best for a cool chip. A training step keeps the chip
at its limit of power, where another one may be a tenth faster: so the products that come again and
again are tried, in long rows, and each keeps the winner. Not where the same bits are wanted in
every run: two runs may find two winners.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mindspeed import device
from mindspeed.ops import cublaslt
from mindspeed.ops.cublaslt import ALIGNMENT
from mindspeed.ops.watched import is_watched

logger = logging.getLogger(__name__)

LARGE = 1e10  # operations of a product; less is over before it matters
WORTH = 1e13  # operations of all its calls: before, the next micro-batch may have another length
MOST = 64  # products that are tried; one takes half a second
WARM_UP, TURN, TURNS = 0.06, 0.015, 3  # seconds, seconds, how often
NEAR = 1e-2  # of the norm: another order of sums in half precision

Run = Callable[[Tensor, Tensor, Tensor], object]


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a (..., K) @ b (K, N), in `out` (M, N) where that is given."""
    if not _tuner.is_on or not a.is_cuda:
        return a @ b if out is None else torch.mm(a, b, out=out)
    rows = a if a.dim() == 2 else a.flatten(0, -2)
    run = _tuner.find(rows, b, out, None)
    if run is None:
        return a @ b if out is None else torch.mm(a, b, out=out)
    target = rows.new_empty(len(rows), b.shape[1]) if out is None else out
    run(rows, b, target)
    return target if a.dim() == 2 else target.view(*a.shape[:-1], b.shape[1])


def add_product(total: Tensor, a: Tensor, b: Tensor, add: Run) -> None:
    """Add a (M, K) @ b (K, N) to float32 `total` (M, N); add(a, b, total) does it by torch."""
    run = _tuner.find(a, b, total, add) if _tuner.is_on and a.is_cuda else None
    (run or add)(a, b, total)


@contextmanager
def tuning() -> Iterator[None]:
    """Try and choose algorithms from here on."""
    _tuner.is_on = True
    # No try/finally: at the end of the process there is nothing to undo.
    yield
    _tuner.is_on = False


def fastest(runs: Sequence[Callable[[], object]], seconds: Callable[..., float]) -> int:
    """Return which of `runs` takes the least time in the middle of TURNS turns.

    `seconds(run, count)` times so many in a row.
    """
    once = max(seconds(runs[0], 3), 1e-7)
    seconds(runs[0], int(WARM_UP / once))  # clocks fall while the device gets warm
    count = max(1, int(TURN / once))
    turns = [[seconds(run, count) for run in runs] for _ in range(TURNS)]
    medians = [sorted(times)[TURNS // 2] for times in zip(*turns)]
    return medians.index(min(medians))


class _Tuner:
    """What each kind of product runs by."""

    def __init__(self) -> None:
        self.is_on = False
        self._left = MOST
        self._work: dict[tuple[Any, ...], int] = {}
        self._chosen: dict[tuple[Any, ...], Run | None] = {}
        self._memory: dict[tuple[int, int], Tensor] = {}

    def find(self, a: Tensor, b: Tensor, out: Tensor | None, add: Run | None) -> Run | None:
        """Return what runs this product faster than torch; None where nothing does, or not yet."""
        if torch.are_deterministic_algorithms_enabled() or is_watched():
            return None
        if (a.data_ptr() | b.data_ptr() | (0 if out is None else out.data_ptr())) % ALIGNMENT:
            return None
        into = None if out is None else (out.stride(), out.dtype, add is None)
        key = (a.shape, a.stride(), b.shape[1], b.stride(), a.dtype, into, a.device.index)
        if key in self._chosen:
            return self._chosen[key]
        if key not in self._work and not _is_served(a, b, out):
            self._chosen[key] = None
            return None
        self._work[key] = self._work.get(key, 0) + _operations(a, b)
        if self._work[key] >= WORTH and self._left and not _is_recorded():
            self._left -= 1
            self._chosen[key] = self._try(a, b, out, add)
        return self._chosen.get(key)

    @torch.no_grad()
    def _try(self, a: Tensor, b: Tensor, out: Tensor | None, add: Run | None) -> Run | None:
        # Not empty_like, which would close the gaps of a part of a wider matrix.
        like = a.new_empty(len(a), b.shape[1]) if out is None else out
        scratch = like.new_empty_strided(like.shape, like.stride())
        plan = cublaslt.Product(a, b, scratch, add is not None)
        runs = [add or _multiply]
        want = torch.mm(a, b).to(scratch.dtype)
        for number in range(plan.algorithms):
            run = self._by(plan, number)
            run(a, b, scratch.zero_())
            if (scratch - want).norm() <= NEAR * want.norm():
                runs.append(run)
        del want
        best = fastest([functools.partial(run, a, b, scratch) for run in runs], _seconds)
        words = (
            "torch's own is the fastest" if not best else f"number {best} is faster than torch's"
        )
        sizes = " x ".join(map(str, (*scratch.shape, a.shape[1])))
        logger.info("product %s: of %d algorithms %s", sizes, len(runs), words)
        return runs[best] if best else None

    def _by(self, plan: cublaslt.Product, number: int) -> Run:
        def run(a: Tensor, b: Tensor, out: Tensor) -> None:
            index = a.device.index
            stream = torch._C._cuda_getCurrentRawStream(index)
            place = self._workspace(index, stream).data_ptr(), stream
            if plan.run(number, a, b, out, place):
                raise RuntimeError(
                    f"cuBLAS could not multiply {tuple(a.shape)} by {tuple(b.shape)} by the "
                    "algorithm that was chosen: use --no-tune-products"
                )

        return run

    def _workspace(self, index: int, stream: int) -> Tensor:
        """Return the memory of a stream, where products never overlap."""
        memory = self._memory.get((index, stream))
        if memory is None:
            memory = torch.empty(cublaslt.WORKSPACE, dtype=torch.uint8, device=index)
            self._memory[index, stream] = memory
        return memory


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return torch.mm(a, b, out=out)


def _is_served(a: Tensor, b: Tensor, out: Tensor | None) -> bool:
    """Say whether this is a large product of plain half-precision matrices that lie densely."""
    is_plain = all(type(x) in (Tensor, Parameter) and 1 in x.stride() for x in (a, b))
    is_half = a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
    fits = out is None or (out.dtype in (a.dtype, torch.float32) and out.stride(1) == 1)
    return is_plain and is_half and fits and _operations(a, b) >= LARGE


def _operations(a: Tensor, b: Tensor) -> int:
    return 2 * a.numel() * b.shape[1]


def _is_recorded() -> bool:
    """Say whether a graph is being captured, in which nothing can be timed."""
    return torch._C._cuda_isCurrentStreamCapturing()


def _seconds(run: Callable[[], object], count: int) -> float:
    start, end = (device.current().event(timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / max(count, 1) / 1e3


_tuner = _Tuner()
