"""The GEMMs of SwiGLU experts by the package quack-kernels on Hopper.

The first GEMM gathers tokens while it loads them and computes SwiGLU in its epilogue; the GEMM that
computes SwiGLU's gradient applies the routing weights and reduces their gradient. GEMMs that gather
are slower than those that copy whole tiles: in backward, where several read the same rows or the
matrices are wide, tokens are copied to their rows once. A pre-activation is (R, 2F) with gate and
up interleaved; the weights stay [gate; up], as Megatron keeps them. The bounds of the experts stay
on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed import device
from mindspeed.device.hopper import QUACK
from mindspeed.device.precompile import Kernel
from mindspeed.ops.dispatch import is_tracing
from mindspeed.ops.expert_mlp.reference import (
    ExpertRows,
    Kernels,
    Reference,
    number_rows,
    sorted_rows,
)

DTYPES = (torch.bfloat16, torch.float16)
ALIGN_ELEMENTS, ALIGN_BYTES = 64, 16  # of a tile's depth; of an address that TMA copies
MIN_ROWS = 1024  # fewer do not fill the chip
MIN_COPIED_COLUMNS = 1024
"""Columns of GEMMs in backward from which tokens are copied to rows: every tile of a wide GEMM
would gather them again."""


def choose(x: Tensor, first: Tensor, rows: ExpertRows) -> Kernels:
    """Return the fastest kernels for x (T, H), or (R, H), and first (E, 2F, H)."""
    return Quack() if _is_supported(x, first, rows) else Reference()


def _is_supported(x: Tensor, first: Tensor, rows: ExpertRows) -> bool:
    _, columns, hidden = first.shape
    return (
        not is_tracing()
        and x.dtype in DTYPES
        and first.dtype == x.dtype
        and len(rows.row_ids) >= MIN_ROWS
        and hidden % ALIGN_ELEMENTS == 0
        and columns % (2 * ALIGN_ELEMENTS) == 0
        and x.device.type == device.current().name
        and QUACK.is_here()
        and _passes_trial(x.dtype, hidden, columns // 2, rows.tokens is not None)
    )


@functools.cache
def prepare(dtype: torch.dtype, hidden: int, columns: int, is_gathered: bool) -> None:
    """Start to compile the kernels of experts that are built, as `choose` will ask for them."""
    is_aligned = hidden % ALIGN_ELEMENTS == 0 and columns % ALIGN_ELEMENTS == 0
    if dtype in DTYPES and is_aligned and QUACK.is_here():
        QUACK.prepare(_trial_kernels(dtype, hidden, columns, is_gathered), _purpose(dtype))


@functools.cache
def _passes_trial(dtype: torch.dtype, hidden: int, columns: int, is_gathered: bool) -> bool:
    """Return whether all kernels of experts of this size work here; this compiles them."""
    prepare(dtype, hidden, columns, is_gathered)
    trial = functools.partial(_trial, dtype, hidden, columns, is_gathered)
    return QUACK.passes(trial, _purpose(dtype), _trial_kernels(dtype, hidden, columns, is_gathered))


def _purpose(dtype: torch.dtype) -> str:
    return f"grouped GEMMs of experts ({dtype})"


def _trial_kernels(
    dtype: torch.dtype, hidden: int, columns: int, is_gathered: bool
) -> list[Kernel]:
    sizes = (str(dtype).removeprefix("torch."), hidden, columns, is_gathered)
    return [Kernel(run_kernel, (gemm, *sizes)) for gemm in GEMMS]


@torch.no_grad()
def run_kernel(gemm: str, dtype: str, hidden: int, columns: int, is_gathered: bool) -> None:
    """Run one of the kernels on the trial's problem, in a process that compiles it."""
    GEMMS[gemm](Quack(), _Problem.draw(getattr(torch, dtype), hidden, columns, is_gathered))


@torch.no_grad()
def _trial(dtype: torch.dtype, hidden: int, columns: int, is_gathered: bool) -> bool:
    """Compare every kernel on a few uneven experts, one of them empty, with the reference."""
    problem = _Problem.draw(dtype, hidden, columns, is_gathered)
    got, expected = (_run_all(kernels, problem) for kernels in (Quack(), Reference()))
    limit = 4 * torch.finfo(dtype).eps
    return all(_is_near(one, other, limit) for one, other in zip(got, expected, strict=True))


def _is_near(one: Tensor, other: Tensor, limit: float) -> bool:
    error = torch.linalg.vector_norm(one.double() - other.double())
    return bool(error <= limit * torch.linalg.vector_norm(other.double()))


TRIAL_TOKENS, TRIAL_EXPERTS = 192, 4


class _Problem(NamedTuple):
    """A layer of few and uneven experts, one of them empty."""

    x: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor
    weights: Tensor
    rows: ExpertRows

    @classmethod
    def draw(cls, dtype: torch.dtype, hidden: int, columns: int, is_gathered: bool) -> _Problem:
        """Draw its tensors; tokens are gathered, or rows already."""
        generator = torch.Generator().manual_seed(0)
        where = device.current().torch_device

        def draw(*size: int) -> Tensor:
            return (torch.randn(size, generator=generator) / size[-1] ** 0.5).to(where, dtype)

        chosen = torch.zeros(TRIAL_TOKENS, TRIAL_EXPERTS, dtype=torch.bool)
        chosen[:, 0] = True
        chosen[: TRIAL_TOKENS // 3, 1] = True
        chosen[TRIAL_TOKENS // 3 :, 3] = True
        num_rows = 2 * TRIAL_TOKENS
        rows = sorted_rows(chosen.sum(0).to(where), num_rows)
        if is_gathered:
            rows, _ = number_rows(chosen.to(where), num_rows)
        num_tokens = TRIAL_TOKENS if is_gathered else num_rows
        return cls(
            x=draw(num_tokens, hidden),
            grad=draw(num_tokens, hidden),
            first=draw(TRIAL_EXPERTS, 2 * columns, hidden),
            second=draw(TRIAL_EXPERTS, hidden, columns),
            weights=torch.rand(num_rows, generator=generator).to(where),
            rows=rows,
        )

    def zeros(self, columns: int) -> Tensor:
        """Return something for each row."""
        return self.x.new_zeros(len(self.rows.row_ids), columns)

    def totals(self, matrices: Tensor) -> list[Tensor]:
        """Return float32 matrices of ones for gradients to be added to."""
        wide_dtype = torch.promote_types(matrices.dtype, torch.float32)
        return list(torch.ones_like(matrices, dtype=wide_dtype))


def _run_all(kernels: Kernels, problem: _Problem) -> list[Tensor]:
    """Return the output and all gradients of a layer, those of the matrices in both ways."""
    x, grad, first, second, weights, rows = problem
    preact, y = kernels.gated(x, first, rows)
    out = rows.add_up(kernels.project(y, second, rows), weights)
    laid_out, grad_rows = kernels.laid_out(grad, rows, 2 * second.shape[2])
    grad_preact, weighted, grad_weights = kernels.gated_gradient(
        laid_out, second, preact, weights, grad_rows
    )
    grad_x = rows.add_up(kernels.input_gradient(grad_preact, first, rows))
    matrices = []
    for totals in (None, problem.totals(first)):
        stacked = kernels.first_gradient(grad_preact, x, rows, totals)
        matrices.append(torch.stack(totals) - 1 if totals else stacked)
    for totals in (None, problem.totals(second)):
        stacked = kernels.second_gradient(laid_out, weighted, grad_rows, totals)
        matrices.append(torch.stack(totals) - 1 if totals else stacked)
    found = (out, y, weighted, grad_weights, grad_x, *matrices)
    return [one for one in found if one is not None]


def _gated_gradient(kernels: Quack, problem: _Problem) -> object:
    columns = problem.second.shape[2]
    grad, rows = kernels.laid_out(problem.grad, problem.rows, 2 * columns)
    preact = problem.zeros(2 * columns)
    return kernels.gated_gradient(grad, problem.second, preact, problem.weights, rows)


def _first_gradient(is_added: bool, kernels: Quack, problem: _Problem) -> object:
    totals = problem.totals(problem.first) if is_added else None
    preact = problem.zeros(problem.first.shape[1])
    return kernels.first_gradient(preact, problem.x, problem.rows, totals)


def _second_gradient(is_added: bool, kernels: Quack, problem: _Problem) -> object:
    totals = problem.totals(problem.second) if is_added else None
    weighted = problem.zeros(problem.second.shape[2])
    return kernels.second_gradient(problem.grad, weighted, problem.rows, totals)


GEMMS: dict[str, Callable[[Quack, _Problem], object]] = {
    "gated": lambda kernels, p: kernels.gated(p.x, p.first, p.rows),
    "project": lambda kernels, p: kernels.project(p.zeros(p.second.shape[2]), p.second, p.rows),
    "gated_gradient": _gated_gradient,
    "input_gradient": lambda kernels, p: kernels.input_gradient(
        p.zeros(p.first.shape[1]), p.first, p.rows
    ),
    "first_gradient": functools.partial(_first_gradient, False),
    "first_sum": functools.partial(_first_gradient, True),
    "second_gradient": functools.partial(_second_gradient, False),
    "second_sum": functools.partial(_second_gradient, True),
}
"""Every kernel of a layer, each on what it needs of a problem."""


class Quack:
    """The package's kernels."""

    def laid_out(self, x: Tensor, rows: ExpertRows, columns: int) -> tuple[Tensor, ExpertRows]:
        """Copy tokens to their rows where all GEMMs that read them gain more than that takes."""
        return rows.spread(x) if columns >= MIN_COPIED_COLUMNS else (x, rows)

    def gated(self, x: Tensor, first: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor]:
        """Gather, multiply and activate in one kernel."""
        from quack.gemm_interface import gemm_gated

        columns = first.shape[1]
        is_wide = rows.tokens is not None and columns % 256 == 0
        preact, y = gemm_gated(
            _aligned(x),
            _aligned(first).mT,
            activation="swiglu",
            cu_seqlens_m=rows.cu_seqlens,
            A_idx=rows.tokens,
            dynamic_scheduler=False,  # the kernels that gather have no other scheduler
            tuned=False,
            config=_tiles().wide if is_wide else _tile_for_rows(columns),
            concat_layout=("B",),
        )
        return preact, y

    def project(self, y: Tensor, second: Tensor, rows: ExpertRows) -> Tensor:
        """Multiply."""
        out = y.new_empty(len(y), second.shape[1])
        _gemm(y, _aligned(second).mT, out, _tile_for_rows, cu_seqlens_m=rows.cu_seqlens)
        return out

    def gated_gradient(
        self, grad: Tensor, second: Tensor, preact: Tensor, weights: Tensor, rows: ExpertRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Multiply, and recompute SwiGLU with its gradient in the epilogue."""
        from quack.gemm_interface import gemm_dgated

        wide_dtype = torch.promote_types(grad.dtype, torch.float32)
        grad_preact, weighted, grad_weights = gemm_dgated(
            _aligned(grad),
            _aligned(second),
            preact,
            activation="swiglu",
            colvec_scale=_aligned(weights.to(wide_dtype)),
            colvec_reduce=True,
            cu_seqlens_m=rows.cu_seqlens,
            A_idx=rows.tokens,
            dynamic_scheduler=False,
            tuned=False,
            # The epilogue needs registers: narrow tiles.
            config=_tiles().narrow_pair if rows.tokens is None else _tiles().narrow,
        )
        return grad_preact, weighted, grad_weights.to(weights.dtype)

    def input_gradient(self, grad_preact: Tensor, first: Tensor, rows: ExpertRows) -> Tensor:
        """Multiply."""
        out = grad_preact.new_empty(len(grad_preact), first.shape[2])
        bounds = {"cu_seqlens_m": rows.cu_seqlens, "concat_layout": ("B",)}
        _gemm(grad_preact, _aligned(first), out, _tile_for_rows, **bounds)
        return out

    def first_gradient(
        self, grad_preact: Tensor, x: Tensor, rows: ExpertRows, totals: Sequence[Tensor] | None
    ) -> Tensor | None:
        """Take the tokens as the left side: the result is the transpose of the gradient."""
        shape = (len(rows.ends), grad_preact.shape[1], x.shape[1])
        x, rows = self.laid_out(x, rows, grad_preact.shape[1])
        return _outer(_aligned(x), grad_preact, rows, (shape, totals), is_first=True)

    def second_gradient(
        self, grad: Tensor, weighted: Tensor, rows: ExpertRows, totals: Sequence[Tensor] | None
    ) -> Tensor | None:
        """Take the gradient of the output as the left side."""
        shape = (len(rows.ends), grad.shape[1], weighted.shape[1])
        # As in gated_gradient, so that the same kernels run if backward puts this off.
        grad, rows = self.laid_out(grad, rows, 2 * weighted.shape[1])
        return _outer(_aligned(grad), weighted, rows, (shape, totals), is_first=False)


_Target = tuple[tuple[int, int, int], Sequence[Tensor] | None]


def _outer(
    left: Tensor, right: Tensor, rows: ExpertRows, target: _Target, *, is_first: bool
) -> Tensor | None:
    """Multiply the rows of `left`, transposed, by `right` (R, columns), by expert."""
    shape, totals = target
    out = None if totals is None else _side_by_side(totals)
    is_added = out is not None
    if out is None:
        out = left.new_empty(shape, dtype=left.dtype if totals is None else totals[0].dtype)
    _gemm(
        left.t(),
        right,
        out.mT if is_first else out,
        functools.partial(_tile_for_matrices, is_gathered=rows.tokens is not None),
        cu_seqlens_k=rows.cu_seqlens,
        A_idx=rows.tokens,
        concat_layout=("out",) if is_first else None,
        add_to_output=is_added,
    )
    if totals is None:
        return out
    if not is_added:
        torch._foreach_add_(list(totals), list(out.unbind()))
    return None


def _gemm(a: Tensor, b: Tensor, out: Tensor, tile: Callable[[int], Any], **options: Any) -> None:
    from quack.gemm_interface import gemm_tuned

    # `.fn` is what the package's public functions come to, after 0.1 to 0.2 ms on the host.
    gemm_tuned.fn(a, b, out, config=tile(out.shape[-1]), **options)


def _tile_for_rows(columns: int) -> Any:
    """Return the kernel of a GEMM with groups of rows and so many columns."""
    is_padded_little = -(-columns // 192) * 192 <= 1.05 * columns
    return _tiles().middle if is_padded_little else _tiles().narrow


def _tile_for_matrices(columns: int, *, is_gathered: bool) -> Any:
    """Return the kernel of a GEMM that sums groups of rows to matrices with so many columns."""
    if columns % 192:
        return _tiles().wide
    return _tiles().middle if is_gathered else _tiles().middle_dynamic


class _Tiles(NamedTuple):
    """The fastest kernels of about ten for each GEMM on an H200."""

    narrow: Any
    narrow_pair: Any
    middle: Any
    middle_dynamic: Any
    wide: Any


@functools.cache  # the package finds what it has compiled by these very objects
def _tiles() -> _Tiles:
    from quack.gemm_config import GemmConfig

    # Gathering kernels know no dynamic scheduler and no cluster along the columns.
    options = {"cluster_m": 2, "cluster_n": 1, "pingpong": True, "is_dynamic_persistent": False}
    return _Tiles(
        narrow=GemmConfig(tile_n=128, **options),
        narrow_pair=GemmConfig(tile_n=128, **options | {"cluster_m": 1, "cluster_n": 2}),
        middle=GemmConfig(tile_n=192, **options),
        middle_dynamic=GemmConfig(tile_n=192, **options | {"is_dynamic_persistent": True}),
        wide=GemmConfig(tile_n=256, **options | {"pingpong": False}),
    )


def _side_by_side(totals: Sequence[Tensor]) -> Tensor | None:
    """Return E matrices as one tensor where they lie evenly, in order and aligned in memory."""
    first = totals[0]
    step = first.numel() * first.itemsize
    if len(totals) > 1:
        step = totals[1].data_ptr() - first.data_ptr()
    is_even = (
        step >= first.numel() * first.itemsize
        and step % ALIGN_BYTES == 0
        and first.data_ptr() % ALIGN_BYTES == 0
        and all(
            total.data_ptr() == first.data_ptr() + index * step and total.is_contiguous()
            for index, total in enumerate(totals)
        )
        and first.untyped_storage().data_ptr() == totals[-1].untyped_storage().data_ptr()
    )
    if not is_even:
        return None
    return first.as_strided((len(totals), *first.shape), (step // first.itemsize, *first.stride()))


def _aligned(x: Tensor) -> Tensor:
    """Return x with contiguous rows and aligned addresses: matrices may have gaps in between."""
    is_aligned = (
        x.stride(-1) == 1
        and all(stride * x.itemsize % ALIGN_BYTES == 0 for stride in x.stride()[:-1])
        and x.data_ptr() % ALIGN_BYTES == 0
    )
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)
