"""The GEMMs of SwiGLU experts by the package quack-kernels on Hopper.

The first GEMM gathers tokens while it loads them and computes SwiGLU in its epilogue; the GEMM that
computes SwiGLU's gradient gathers the gradient of the output, applies the routing weights, and
reduces their gradient; those of the weights gather tokens once more. Gathered rows are never
written. A pre-activation is (R, 2F) with gate and up interleaved; the weights stay [gate; up], as
Megatron keeps them. The bounds of the experts stay on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed import device
from mindspeed.device.hopper import QUACK
from mindspeed.ops.dispatch import is_tracing
from mindspeed.ops.expert_mlp.reference import ExpertRows, Kernels, Reference, number_rows

DTYPES = (torch.bfloat16, torch.float16)
ALIGN_ELEMENTS, ALIGN_BYTES = 64, 16  # of a tile's depth; of an address that TMA copies
MIN_ROWS = 1024  # fewer do not fill the chip


def choose(x: Tensor, first: Tensor, num_rows: int) -> Kernels:
    """Return the fastest kernels for x (T, H) and first (E, 2F, H)."""
    return Quack() if _is_supported(x, first, num_rows) else Reference()


def _is_supported(x: Tensor, first: Tensor, num_rows: int) -> bool:
    _, columns, hidden = first.shape
    return (
        not is_tracing()
        and x.dtype in DTYPES
        and first.dtype == x.dtype
        and num_rows >= MIN_ROWS
        and hidden % ALIGN_ELEMENTS == 0
        and columns % (2 * ALIGN_ELEMENTS) == 0
        and x.device.type == device.current().name
        and QUACK.is_here()
        and _passes_trial(x.dtype)
    )


@functools.cache
def _passes_trial(dtype: torch.dtype) -> bool:
    """Return whether all kernels of this dtype work here; this compiles them."""

    def works() -> bool:
        return all(_trial(dtype, *sizes) for sizes in TRIAL_SIZES)

    return QUACK.passes(works, f"grouped GEMMs of experts ({dtype})")


TRIAL_TOKENS, TRIAL_EXPERTS = 192, 4
TRIAL_SIZES = ((128, 64), (192, 192))
"""Hidden sizes and columns that choose the tile of 128, and that of 192, for every GEMM."""


@torch.no_grad()
def _trial(dtype: torch.dtype, hidden: int, columns: int) -> bool:
    """Compare every kernel on a few uneven experts, one of them empty, with the reference."""
    generator = torch.Generator().manual_seed(0)
    where = device.current().torch_device

    def draw(*size: int) -> Tensor:
        return (torch.randn(size, generator=generator) / size[-1] ** 0.5).to(where, dtype)

    chosen = torch.zeros(TRIAL_TOKENS, TRIAL_EXPERTS, dtype=torch.bool)
    chosen[:, 0] = True
    chosen[: TRIAL_TOKENS // 3, 1] = True
    chosen[TRIAL_TOKENS // 3 :, 3] = True
    rows, _ = number_rows(chosen.to(where), 2 * TRIAL_TOKENS)
    first = draw(TRIAL_EXPERTS, 2 * columns, hidden)
    second = draw(TRIAL_EXPERTS, hidden, columns)
    x, grad = draw(TRIAL_TOKENS, hidden), draw(TRIAL_TOKENS, hidden)
    weights = torch.rand(len(rows.tokens), generator=generator).to(where)
    got, expected = (
        _run_all(kernels, (x, grad), (first, second), weights, rows)
        for kernels in (Quack(), Reference())
    )
    limit = 4 * torch.finfo(dtype).eps
    return all(_is_near(one, other, limit) for one, other in zip(got, expected, strict=True))


def _is_near(one: Tensor, other: Tensor, limit: float) -> bool:
    error = torch.linalg.vector_norm(one.double() - other.double())
    return bool(error <= limit * torch.linalg.vector_norm(other.double()))


def _run_all(
    kernels: Kernels,
    activations: tuple[Tensor, Tensor],
    matrices: tuple[Tensor, Tensor],
    weights: Tensor,
    rows: ExpertRows,
) -> list[Tensor]:
    """Return the output and all gradients of a layer, those of the matrices in both ways."""
    (x, grad), (first, second) = activations, matrices
    preact, y = kernels.gated(x, first, rows)
    out = rows.add_up(kernels.project(y, second, rows), weights)
    grad_preact, weighted, grad_weights = kernels.gated_gradient(
        grad, second, preact, weights, rows
    )
    grad_x = rows.add_up(kernels.input_gradient(grad_preact, first, rows))
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    totals = [torch.ones_like(matrix, dtype=wide_dtype) for matrix in matrices]
    kernels.first_gradient(grad_preact, x, rows, list(totals[0]))
    kernels.second_gradient(grad, weighted, rows, list(totals[1]))
    added = [total - 1 for total in totals]
    separate = [
        kernels.first_gradient(grad_preact, x, rows, None),
        kernels.second_gradient(grad, weighted, rows, None),
    ]
    stacked = [one for one in separate if one is not None]
    return [out, y, weighted, grad_weights, grad_x, *added, *stacked]


class Quack:
    """The package's kernels."""

    def gated(self, x: Tensor, first: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor]:
        """Gather, multiply and activate in one kernel."""
        from quack.gemm_interface import gemm_gated

        preact, y = gemm_gated(
            _aligned(x),
            _aligned(first).mT,
            activation="swiglu",
            cu_seqlens_m=rows.cu_seqlens,
            A_idx=rows.tokens,
            dynamic_scheduler=False,  # the kernels that gather have no other scheduler
            tuned=False,
            config=_config(first.shape[1]),
            concat_layout=("B",),
        )
        return preact, y

    def project(self, y: Tensor, second: Tensor, rows: ExpertRows) -> Tensor:
        """Multiply."""
        out = y.new_empty(len(y), second.shape[1])
        _gemm(y, _aligned(second).mT, out, cu_seqlens_m=rows.cu_seqlens)
        return out

    def gated_gradient(
        self, grad: Tensor, second: Tensor, preact: Tensor, weights: Tensor, rows: ExpertRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gather, multiply, and recompute SwiGLU with its gradient in the epilogue."""
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
            config=_config(0),  # the epilogue needs registers: the narrow tile
        )
        return grad_preact, weighted, grad_weights.to(weights.dtype)

    def input_gradient(self, grad_preact: Tensor, first: Tensor, rows: ExpertRows) -> Tensor:
        """Multiply."""
        out = grad_preact.new_empty(len(grad_preact), first.shape[2])
        bounds = {"cu_seqlens_m": rows.cu_seqlens, "concat_layout": ("B",)}
        _gemm(grad_preact, _aligned(first), out, **bounds)
        return out

    def first_gradient(
        self, grad_preact: Tensor, x: Tensor, rows: ExpertRows, totals: Sequence[Tensor] | None
    ) -> Tensor | None:
        """Gather the tokens as the left side: the result is the transpose of the gradient."""
        shape = (len(rows.ends), grad_preact.shape[1], x.shape[1])
        return _outer(_aligned(x), grad_preact, rows, (shape, totals), is_first=True)

    def second_gradient(
        self, grad: Tensor, weighted: Tensor, rows: ExpertRows, totals: Sequence[Tensor] | None
    ) -> Tensor | None:
        """Gather the gradient of the output as the left side."""
        shape = (len(rows.ends), grad.shape[1], weighted.shape[1])
        return _outer(_aligned(grad), weighted, rows, (shape, totals), is_first=False)


_Target = tuple[tuple[int, int, int], Sequence[Tensor] | None]


def _outer(
    left: Tensor, right: Tensor, rows: ExpertRows, target: _Target, *, is_first: bool
) -> Tensor | None:
    """Multiply the gathered rows of `left`, transposed, by `right` (R, columns), by expert."""
    shape, totals = target
    out = None if totals is None else _side_by_side(totals)
    is_added = out is not None
    if out is None:
        out = left.new_empty(shape, dtype=left.dtype if totals is None else totals[0].dtype)
    _gemm(
        left.t(),
        right,
        out.mT if is_first else out,
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


def _gemm(a: Tensor, b: Tensor, out: Tensor, **options: Any) -> None:
    from quack.gemm_interface import gemm_tuned

    # `.fn` is what the package's public functions come to, after 0.1 to 0.2 ms on the host.
    gemm_tuned.fn(a, b, out, config=_config(out.shape[-1]), **options)


def _config(columns: int) -> Any:
    """Return the kernel for a GEMM with so many columns: the tile that pads them least."""
    return _configs()[0 if columns and -(-columns // 192) * 192 <= 1.05 * columns else 1]


@functools.cache  # the package finds what it has compiled by these very objects
def _configs() -> tuple[Any, Any]:
    from quack.gemm_config import GemmConfig

    # Gathering kernels know no dynamic scheduler and no cluster along the columns.
    options = {"cluster_m": 2, "cluster_n": 1, "pingpong": True, "is_dynamic_persistent": False}
    return GemmConfig(tile_n=192, **options), GemmConfig(tile_n=128, **options)


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
