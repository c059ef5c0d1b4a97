"""SwiGLU inside the products around it, by the package quack-kernels on Hopper.

The product before it writes gate and up of a column side by side, as pairs, and silu(gate) * up
beside them; the gradient of the product behind it comes out as that of the pairs. Nothing passes
over them in between. T tokens, H hidden, F columns; the weight before stays [gate; up] (2F, H), as
Megatron keeps it, and is never laid out anew. Looking for the best kernels takes the package
minutes at the start: those of backward are named here, the one of forward is its standard.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed import device
from mindspeed.device.hopper import QUACK
from mindspeed.ops.dispatch import is_watched
from mindspeed.ops.swiglu import swiglu_gradient

HALF = (torch.bfloat16, torch.float16)
ALIGNED, BYTES = 8, 16  # elements of a row and their bytes, which the copy engine takes at least
TOKENS = 1024  # fewer do not fill the chip


def serves(x: Tensor, weight: Tensor, more: int = 0) -> bool:
    """Say whether these, with some more columns, can be multiplied so, and it is the fastest."""
    columns, hidden = weight.shape
    return (
        not is_watched()
        and x.dtype in HALF
        and x.numel() >= TOKENS * hidden
        and _is_aligned(hidden + more, columns // 2)
        and columns % 2 == 0
        and x.device.type == device.current().name
        and QUACK.is_here()
        and _is_proven(x.dtype)
    )


@functools.cache
def _is_proven(dtype: torch.dtype) -> bool:
    """Say whether all kernels of this type work here; this compiles them."""
    return QUACK.passes(functools.partial(_trial, dtype), f"SwiGLU inside GEMMs ({dtype})")


@torch.no_grad()
def _trial(dtype: torch.dtype) -> bool:
    """Run forward and backward of a small MLP; every result is known without rounding."""
    here = {"dtype": dtype, "device": device.current().torch_device}
    x, before = torch.zeros(128, 64, **here), torch.ones(256, 64, **here)
    after, grad = torch.ones(64, 128, **here), torch.ones(128, 64, **here)
    x[:, 0] = 1.0
    pairs, y = product(x, before)
    grad_pairs, again = gradient(grad, after, pairs)
    total = torch.zeros(256, 64, dtype=torch.float32, device=x.device)
    add_weight_gradient(total, grad_pairs, x)
    silu, slope = 0.7310586, 0.9276705  # of 1
    expected = (
        (y, silu),
        (again, silu),
        (grad_pairs[..., 0], 64 * slope),
        (input_gradient(grad_pairs, before), 128 * 64 * (slope + silu)),
        (total[:128, 0], 128 * 64 * slope),
        (total[128:, 0], 128 * 64 * silu),
    )
    return all(bool(((one - value).abs() <= 0.02 * value).all()) for one, value in expected)


def product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply x (..., H) by weight (2F, H): the pairs (..., F, 2), and swiglu of them (..., F)."""
    from quack.gemm_interface import gemm_gated

    pairs, y = gemm_gated(
        *(_rows(x), _rows(weight).t()), activation="swiglu", concat_layout=("B",), tuned=False
    )
    return pairs.view(*x.shape[:-1], -1, 2), y.view(*x.shape[:-1], -1)


def gradient(grad: Tensor, weight: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the pairs and once more swiglu of them.

    `grad` (..., H) is that of swiglu(pairs) times weight (H, F).
    """
    from quack.gemm_interface import gemm_dgated

    if is_watched() or not _is_aligned(*weight.shape):
        return _plain_gradient(grad @ weight, pairs)
    rows = _rows(grad), _rows(weight), _flat(pairs)
    options = {"activation": "swiglu", "tuned": False, "config": _kernels().gradient}
    grad_pairs, y = gemm_dgated(*rows, **options)
    return grad_pairs.view(pairs.shape), y.view(pairs.shape[:-1])


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Multiply the gradient of pairs (..., F, 2) by weight (2F, H)."""
    if is_watched():
        return _apart(grad) @ weight
    out = grad.new_empty(*grad.shape[:-2], weight.shape[1])
    _multiply(_flat(grad), _rows(weight), out.flatten(0, -2), ("B",), _kernels().input_gradient)
    return out


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return grad^T x as the gradient of [gate; up] (2F, H), in the type of grad by default."""
    if is_watched():
        return (_apart(grad).flatten(0, -2).t() @ x.flatten(0, -2)).to(dtype or grad.dtype)
    out = grad.new_empty(2 * grad.shape[-2], x.shape[-1], dtype=dtype)
    _multiply(_flat(grad).t(), _rows(x), out, ("out",), _kernels().weight_gradient)
    return out


def add_weight_gradient(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add grad^T x to the gradient of [gate; up] (2F, H)."""
    # Megatron packs gradients one behind the other, of any size.
    if is_watched() or total.data_ptr() % BYTES:
        total.add_(weight_gradient(grad, x, total.dtype))
        return
    kernel = _kernels().weight_gradient
    _multiply(_flat(grad).t(), _rows(x), total, ("C", "out"), kernel, add_to_output=True)


def _multiply(
    a: Tensor, b: Tensor, out: Tensor, halved: tuple[str, ...], kernel: Any, **options: Any
) -> None:
    """Write a b to out; matrices named in `halved` hold [gate; up] where others have pairs."""
    from quack.gemm_interface import gemm_tuned

    # `.fn` is what the package's public functions come to, after 0.1 to 0.2 ms on the host.
    gemm_tuned.fn(a, b, out, config=kernel, concat_layout=halved, **options)


class _Kernels(NamedTuple):
    gradient: Any
    input_gradient: Any
    weight_gradient: Any


@functools.cache  # the package finds what it has compiled by these very objects
def _kernels() -> _Kernels:
    """Return the fastest in a long row on an H200, of twenty each."""
    from quack.gemm_config import GemmConfig

    return _Kernels(
        gradient=GemmConfig(tile_n=160),  # the epilogue wants registers
        input_gradient=GemmConfig(
            tile_m=256, pingpong=False, is_dynamic_persistent=False, cluster_m=1, cluster_n=2
        ),
        weight_gradient=GemmConfig(),
    )


def swiglu_of(pairs: Tensor, y: Tensor) -> Tensor:
    """Return y, which is swiglu of the pairs, with a gradient for whoever asks another than us."""
    return _SwiGLUOfPairs.apply(pairs, y)


class _SwiGLUOfPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(pairs)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (pairs,) = ctx.saved_tensors
        return _plain_gradient(grad, pairs)[0], None


def _plain_gradient(grad: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    grad_packed, y = swiglu_gradient(grad, _apart(pairs))
    return grad_packed.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous(), y


def _apart(pairs: Tensor) -> Tensor:
    """Lay pairs (..., F, 2) out as [gate | up] (..., 2F)."""
    return pairs.transpose(-1, -2).flatten(-2)


def _is_aligned(*sizes: int) -> bool:
    return all(size % ALIGNED == 0 for size in sizes)


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return rows.clone() if rows.data_ptr() % BYTES else rows


def _flat(pairs: Tensor) -> Tensor:
    return _rows(pairs.flatten(-2))
