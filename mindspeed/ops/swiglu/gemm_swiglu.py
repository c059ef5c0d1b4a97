"""SwiGLU in the epilogue of the GEMMs around it, by the package quack-kernels on Hopper.

The GEMM before SwiGLU writes its output with gate and up interleaved, and silu(gate) * up beside
it; the GEMM that computes the gradient of SwiGLU's output writes that of gate and up directly. No
kernel passes over them in between. T tokens, H hidden, F columns; `preact` is the interleaved
output (..., F, 2). The weight stays [gate; up] (2F, H), as Megatron keeps it, and is never
rearranged. The package's autotuning takes minutes at the start: the kernels of backward are chosen
here, that of forward is its default.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed import device
from mindspeed.device.hopper import QUACK
from mindspeed.device.precompile import Kernel
from mindspeed.ops.dispatch import is_tracing
from mindspeed.ops.swiglu import swiglu_gradient

DTYPES = (torch.bfloat16, torch.float16)
ALIGN_ELEMENTS, ALIGN_BYTES = 8, 16  # row size and address that TMA copies need
MIN_TOKENS = 1024  # fewer do not fill the chip
CLUSTER_N = 2  # neighbouring tiles that share rows: the columns of a GEMM are padded to whole pairs
TILES_N = (192, 160, 208)  # the fastest first, where it fills its pairs
TALL, SHORT = 256, 128
"""Rows of a tile of the input gradient: tall ones are faster, unless their last wave is emptier."""


def is_supported(x: Tensor, weight: Tensor, extra_columns: int = 0) -> bool:
    """Return whether the kernels take x (..., H) and weight (2F, H), and are the fastest.

    Args:
        x: input of the GEMM.
        weight: [gate; up].
        extra_columns: columns that the caller appends to both, as low-rank factors.
    """
    columns, hidden = weight.shape
    return (
        not is_tracing()
        and x.dtype in DTYPES
        and x.numel() >= MIN_TOKENS * hidden
        and _is_aligned(hidden + extra_columns, columns // 2)
        and columns % 2 == 0
        and x.device.type == device.current().name
        and QUACK.is_here()
        and _passes_trial(x.dtype, tile_for(hidden, extra_columns))
    )


def tile_for(columns: int, extra_columns: int) -> int:
    """Return the tile of `input_gradient` that columns of low-rank factors, if any, fit best."""
    if not extra_columns:
        return TILES_N[0]
    total = columns + extra_columns
    return min(TILES_N, key=lambda tile: -(-total // (CLUSTER_N * tile)) * tile)


@functools.cache  # every layer asks
def prepare(dtype: torch.dtype, hidden: int, extra_columns: int = 0) -> None:
    """Start to compile the kernels of a layer that is built, as `is_supported` will ask for it."""
    if dtype in DTYPES and _is_aligned(hidden + extra_columns) and QUACK.is_here():
        tile_n = tile_for(hidden, extra_columns)
        QUACK.prepare(_trial_kernels(dtype, tile_n), _purpose(dtype))


@functools.cache
def _passes_trial(dtype: torch.dtype, tile_n: int) -> bool:
    """Return whether all kernels of this dtype work here; this compiles them."""
    trial = functools.partial(_trial, dtype, tile_n)
    return QUACK.passes(trial, _purpose(dtype), _trial_kernels(dtype, tile_n))


def _purpose(dtype: torch.dtype) -> str:
    return f"SwiGLU inside GEMMs ({dtype})"


def _trial_kernels(dtype: torch.dtype, tile_n: int) -> list[Kernel]:
    name = str(dtype).removeprefix("torch.")
    others = ("forward", "gradient", "weight_gradient")
    return [
        *(Kernel(run_kernel, (kernel, name, 0)) for kernel in others),
        *(
            Kernel(run_kernel, ("input_gradient", name, tile_n, tile_m))
            for tile_m in _heights(tile_n)
        ),
    ]


@torch.no_grad()
def run_kernel(kernel: str, dtype: str, tile_n: int, tile_m: int = TALL) -> None:
    """Run one of the kernels on a problem of the trial's size, in a process that compiles it."""
    options: dict[str, Any] = {
        "dtype": getattr(torch, dtype),
        "device": device.current().torch_device,
    }
    x, weight1 = (torch.zeros(size, 64, **options) for size in (128, 256))
    weight2, preact = torch.zeros(64, 128, **options), torch.zeros(128, 128, 2, **options)
    if kernel == "forward":
        gemm_swiglu(x, weight1)
    elif kernel == "evaluation":
        gemm_swiglu(x, weight1, keeps_preact=False)
    elif kernel == "gradient":
        gemm_swiglu_gradient(x, weight2, preact)
    elif kernel == "input_gradient":
        input_gradient(preact, weight1, tile_n, tile_m)
    else:
        add_weight_gradient(weight1.float(), preact, x)


@torch.no_grad()
def _trial(dtype: torch.dtype, tile_n: int) -> bool:
    """Run forward and backward of a small MLP; every result is known without rounding."""
    options: dict[str, Any] = {"dtype": dtype, "device": device.current().torch_device}
    x, weight1 = torch.zeros(128, 64, **options), torch.ones(256, 64, **options)
    weight2, grad = torch.ones(64, 128, **options), torch.ones(128, 64, **options)
    x[:, 0] = 1.0
    preact, y = gemm_swiglu(x, weight1)
    grad_preact, recomputed = gemm_swiglu_gradient(grad, weight2, preact)
    main_grad = torch.zeros(256, 64, dtype=torch.float32, device=x.device)
    add_weight_gradient(main_grad, grad_preact, x)
    silu, slope = 0.7310586, 0.9276705  # of 1
    expected = (
        (y, silu),
        (recomputed, silu),
        (grad_preact[..., 0], 64 * slope),
        *(
            (input_gradient(grad_preact, weight1, tile_n, tile_m), 128 * 64 * (slope + silu))
            for tile_m in _heights(tile_n)
        ),
        (main_grad[:128, 0], 128 * 64 * slope),
        (main_grad[128:, 0], 128 * 64 * silu),
    )
    return all(bool(((one - value).abs() <= 0.02 * value).all()) for one, value in expected)


def needs_preact(dtype: torch.dtype) -> bool:
    """Return whether `gemm_swiglu` has to keep preact: for backward, or for want of a kernel."""
    return torch.is_grad_enabled() or not _passes_evaluation(dtype)


@functools.cache
def _passes_evaluation(dtype: torch.dtype) -> bool:
    """Return whether the kernel that writes no preact works here; this compiles it.

    Apart from `_passes_trial`: many runs have no pass without gradients.
    """
    kernel = Kernel(run_kernel, ("evaluation", str(dtype).removeprefix("torch."), 0))
    purpose = f"{_purpose(dtype)} without gradients"
    return QUACK.passes(functools.partial(_try_evaluation, dtype), purpose, [kernel])


@torch.no_grad()
def _try_evaluation(dtype: torch.dtype) -> bool:
    """Compare the kernel with that of training."""
    options: dict[str, Any] = {"dtype": dtype, "device": device.current().torch_device}
    x, weight = torch.eye(128, 64, **options), torch.ones(256, 64, **options)
    weight[:128] = 2.0
    _, expected = gemm_swiglu(x, weight)
    preact, y = gemm_swiglu(x, weight, keeps_preact=False)
    return preact is None and torch.equal(y, expected)


def gemm_swiglu(x: Tensor, weight: Tensor, *, keeps_preact: bool = True) -> tuple[Any, Tensor]:
    """Return preact = x (..., H) times weight (2F, H), interleaved, and swiglu of it (..., F).

    None stands for a preact that is not kept: see `needs_preact`.
    """
    from quack.gemm_interface import gemm_gated

    options = {"activation": "swiglu", "concat_layout": ("B",), "tuned": False}
    if not keeps_preact:
        options["store_preact"] = False
    preact, y = gemm_gated(_rows(x), _rows(weight).t(), **options)
    preact = preact.view(*x.shape[:-1], -1, 2) if keeps_preact else None
    return preact, y.view(*x.shape[:-1], -1)


def gemm_swiglu_gradient(grad: Tensor, weight: Tensor, preact: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of preact and, recomputed, swiglu of it.

    `grad` (..., H) is the gradient of swiglu(preact) times weight (H, F).
    """
    from quack.gemm_interface import gemm_dgated

    if is_tracing() or not _is_aligned(*weight.shape):
        return _plain_gradient(grad @ weight, preact)
    rows = _rows(grad), _rows(weight), _flat(preact)
    options = {"activation": "swiglu", "tuned": False, "config": _kernels().gradient}
    grad_preact, y = gemm_dgated(*rows, **options)
    return grad_preact.view(preact.shape), y.view(preact.shape[:-1])


def input_gradient(
    grad: Tensor, weight: Tensor, tile_n: int = TILES_N[0], tile_m: int | None = None
) -> Tensor:
    """Multiply the gradient of preact (..., F, 2) by weight (2F, H).

    Tiles have `tile_n` columns and `tile_m` rows: by default as many as leave the fewest
    processors without work.
    """
    if is_tracing():
        return _deinterleaved(grad) @ weight
    out = grad.new_empty(*grad.shape[:-2], weight.shape[1])
    rows = out.flatten(0, -2)
    tile_m = tile_m or _tile_rows(*rows.shape, tile_n)
    _gemm(_flat(grad), _rows(weight), rows, ("B",), _kernels().input_gradient[tile_m, tile_n])
    return out


@functools.lru_cache(maxsize=1024)  # batches without padding have any number of rows
def _tile_rows(rows: int, columns: int, tile_n: int) -> int:
    """Return how tall the tiles are that take the least time, counted in rows of a wave."""
    processors = device.current().multiprocessors()

    def duration(tile_m: int) -> int:
        tiles = -(-rows // tile_m) * -(-columns // (CLUSTER_N * tile_n)) * CLUSTER_N
        return -(-tiles // processors) * tile_m

    return min(_heights(tile_n), key=duration)


def _heights(tile_n: int) -> tuple[int, ...]:
    """Return how many rows tiles of so many columns may have; the widest need all registers."""
    return (TALL, SHORT) if tile_n <= TILES_N[0] else (TALL,)


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return grad^T x as the gradient of [gate; up] (2F, H), in the dtype of grad by default."""
    if is_tracing():
        return (_deinterleaved(grad).flatten(0, -2).t() @ x.flatten(0, -2)).to(dtype or grad.dtype)
    out = grad.new_empty(2 * grad.shape[-2], x.shape[-1], dtype=dtype)
    _gemm(_flat(grad).t(), _rows(x), out, ("out",), _kernels().weight_gradient)
    return out


def add_weight_gradient(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add grad^T x to the gradient of [gate; up] (2F, H)."""
    # Megatron packs gradients of any size back to back: their addresses are not all aligned.
    if is_tracing() or main_grad.data_ptr() % ALIGN_BYTES:
        main_grad.add_(weight_gradient(grad, x, main_grad.dtype))
        return
    kernel = _kernels().weight_gradient
    _gemm(_flat(grad).t(), _rows(x), main_grad, ("C", "out"), kernel, add_to_output=True)


def _gemm(
    a: Tensor, b: Tensor, out: Tensor, concatenated: tuple[str, ...], kernel: Any, **options: Any
) -> None:
    """Write a b to out; matrices named in `concatenated` are [gate; up], others interleaved."""
    from quack.gemm_interface import gemm_tuned

    # `.fn` is what the package's public functions come to, after 0.1 to 0.2 ms on the host.
    gemm_tuned.fn(a, b, out, config=kernel, concat_layout=concatenated, **options)


class _Kernels(NamedTuple):
    gradient: Any
    input_gradient: dict[tuple[int, int], Any]
    """By the rows and columns of a tile."""
    weight_gradient: Any


@functools.cache  # the package finds what it has compiled by these very objects
def _kernels() -> _Kernels:
    """Return the kernels that were the fastest of twenty each, back to back on an H200."""
    from quack.gemm_config import GemmConfig

    return _Kernels(
        gradient=GemmConfig(tile_n=160),  # the epilogue needs registers
        input_gradient={
            (tile_m, tile_n): GemmConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                pingpong=tile_m == SHORT,  # two tiles in turns: registers for one that is short
                is_dynamic_persistent=False,
                cluster_m=1,
                cluster_n=CLUSTER_N,
            )
            for tile_n in TILES_N
            for tile_m in _heights(tile_n)
        },
        weight_gradient=GemmConfig(),
    )


def with_gradient(y: Tensor, preact: Tensor) -> Tensor:
    """Return y, which `gemm_swiglu` computed of preact, as a differentiable function of preact."""
    return _SwiGLU.apply(preact, y)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, preact: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(preact)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (preact,) = ctx.saved_tensors
        return _plain_gradient(grad, preact)[0], None


def _plain_gradient(grad: Tensor, preact: Tensor) -> tuple[Tensor, Tensor]:
    grad_packed, y = swiglu_gradient(grad, _deinterleaved(preact))
    return grad_packed.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous(), y


def _deinterleaved(preact: Tensor) -> Tensor:
    """Return (..., F, 2) as [gate | up] (..., 2F)."""
    return preact.transpose(-1, -2).flatten(-2)


def _is_aligned(*sizes: int) -> bool:
    return all(size % ALIGN_ELEMENTS == 0 for size in sizes)


def _rows(x: Tensor) -> Tensor:
    """Return x as rows that TMA copies: they may have gaps in between, as in a wider buffer."""
    rows = x.reshape(-1, x.shape[-1])
    is_aligned = (
        rows.stride(1) == 1
        and rows.stride(0) >= rows.shape[1]
        and rows.stride(0) * rows.itemsize % ALIGN_BYTES == 0
        and rows.data_ptr() % ALIGN_BYTES == 0
    )
    return rows if is_aligned else rows.clone(memory_format=torch.contiguous_format)


def _flat(preact: Tensor) -> Tensor:
    return _rows(preact.flatten(-2))
