"""What the rotary embeddings accept, whichever implementation runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

LARGEST_HEAD = 896


def check_table(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> None:
    """Raise ValueError for tables that cannot turn x."""
    if mode not in (0, 1):
        raise ValueError(f"mode={mode}: use 0 (halves) or 1 (interleaved)")
    if x.dim() != 4 or x.shape[-1] % 2 or x.shape[-1] >= LARGEST_HEAD:
        raise ValueError(
            f"rotary_position_embedding needs x of 4 dimensions with an even head size below "
            f"{LARGEST_HEAD}, got {tuple(x.shape)}"
        )
    fits = all(n in (1, of) for n, of in zip(cos.shape, x.shape)) and cos.shape[-1] == x.shape[-1]
    if cos.shape != sin.shape or cos.dim() != 4 or not fits:
        raise ValueError(
            f"cos and sin must have one shape that broadcasts to x {tuple(x.shape)}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )


def check_angles(
    q: Tensor,
    k: Tensor | None,
    freqs: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """Raise ValueError for angles that cannot turn q and k."""
    for x in (q, k):
        if x is not None and (x.dim() != 4 or x.shape[:2] != q.shape[:2]):
            raise ValueError(f"q and k must be (S, B, N, H) with one S and B, got {tuple(x.shape)}")
        if x is not None and freqs.shape[-1] > x.shape[-1]:
            raise ValueError(
                f"freqs turns {freqs.shape[-1]} channels, the heads have {x.shape[-1]}"
            )
    _check_freqs(freqs, q.shape[1])
    if positions is None and freqs.shape[0] < q.shape[0]:
        raise ValueError(f"freqs knows {freqs.shape[0]} positions, the sequence has {q.shape[0]}")


def check_packed(
    qkv: Tensor, freqs: Tensor, sizes: Sequence[int], interleaved: bool = False
) -> None:
    """Raise ValueError for a packed tensor that does not split into whole heads."""
    if qkv.dim() != 4 or sum(sizes) != qkv.shape[-1] or sizes[1] != sizes[2]:
        raise ValueError(
            f"qkv must be (S, B, groups, queries | key | value) with a key and a value of one "
            f"size, got {tuple(qkv.shape)} to split in {list(sizes)}"
        )
    if sizes[0] % sizes[1] or freqs.shape[-1] > sizes[1]:
        raise ValueError(
            f"queries of {sizes[0]} channels and {freqs.shape[-1]} turned channels do not fit "
            f"heads of {sizes[1]}"
        )
    _check_freqs(freqs, qkv.shape[1])
    if freqs.shape[0] < qkv.shape[0]:
        raise ValueError(f"freqs knows {freqs.shape[0]} positions, the sequence has {qkv.shape[0]}")


def _check_freqs(freqs: Tensor, batch: int) -> None:
    is_table = freqs.dim() == 4 and freqs.shape[1] in (1, batch) and freqs.shape[2] == 1
    if not is_table or freqs.shape[-1] % 2:
        raise ValueError(
            f"freqs must be (positions, 1 or {batch}, 1, an even number), got {tuple(freqs.shape)}"
        )
