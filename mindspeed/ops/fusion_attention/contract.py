"""What fusion_attention accepts, whichever implementation runs, and how its answer looks.

B batch, S sequence, N heads, D head size, T tokens of all documents. Seven results: out, two
statistics (B, N, S, 8) or (T, N, 8) in float32, each number eight times, an empty tensor, and three
numbers that name the dropout of an NPU (0 elsewhere) and its size. The sum of the exponentials of a
row is exp(softmax_max) * softmax_sum: a backend that knows its logarithm puts it in the first, and
1 in the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
ALL = 2147483647
COPIES = 8
Results = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]


@dataclass(frozen=True)
class Options:
    """The keywords of fusion_attention.

    sparse_mode says what a query sees: 0 what atten_mask leaves of the band from pre_tokens before
    it to next_tokens after it, 1 what atten_mask leaves, 2 causal with the first query at the first
    key, 3 causal with the last query at the last key, 4 the band with the last query at the last
    key, 5 and 6 mode 3 and the first `prefix` keys, 7 mode 3 with the last document in mode 4, 8
    mode 2 with the first document in mode 4. The masks that modes 2 to 8 come with are the same for
    all, and only their presence is looked at.
    pse_type: 1 adds pse before the scale, 0 after it; 2 and 3 make it from one slope a head, minus
    slope times the distance or its square root.
    """

    pse: Tensor | None = None
    padding_mask: Tensor | None = None
    atten_mask: Tensor | None = None
    scale: float = 1.0
    keep_prob: float = 1.0
    pre_tokens: int = ALL
    next_tokens: int = ALL
    inner_precise: int = 0
    prefix: Sequence[int] | None = None
    actual_seq_qlen: Sequence[int] | None = None
    actual_seq_kvlen: Sequence[int] | None = None
    sparse_mode: int = 0
    gen_mask_parallel: bool = True
    sync: bool = False
    pse_type: int = 1
    q_start_idx: Sequence[int] | None = None
    kv_start_idx: Sequence[int] | None = None


NAMES = frozenset(field.name for field in fields(Options))


def check(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any
) -> None:
    """Raise ValueError for what no implementation computes."""
    unknown = [name for name in options if name not in NAMES]
    if unknown:
        raise TypeError(f"fusion_attention does not know {', '.join(sorted(unknown))}")
    if input_layout not in LAYOUTS:
        raise ValueError(f"input_layout={input_layout}: use {', '.join(LAYOUTS)}")
    given = Options(**options)
    _check_heads(query, key, value, head_num, input_layout)
    _check_masks(given, input_layout)
    if given.padding_mask is not None:
        raise ValueError("padding_mask is not supported: give atten_mask")
    if not 0.0 < given.keep_prob <= 1.0:
        raise ValueError(f"keep_prob={given.keep_prob}: use a probability above 0, up to 1")
    if given.pse_type not in (0, 1, 2, 3):
        raise ValueError(f"pse_type={given.pse_type}: use 0, 1, 2 or 3")


def _check_heads(query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str) -> None:
    if query.dim() != len(layout):
        raise ValueError(f"input_layout={layout} and query of shape {tuple(query.shape)}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key, value have types {query.dtype}, {key.dtype}, {value.dtype}")
    place = layout.find("N")
    heads = head_num if place < 0 else query.shape[place]
    if heads != head_num or (place < 0 and query.shape[-1] % head_num):
        raise ValueError(f"head_num={head_num} does not fit query of shape {tuple(query.shape)}")
    size = query.shape[-1] // (head_num if place < 0 else 1)
    groups = key.shape[place] if place >= 0 else key.shape[-1] // max(size, 1)
    if not groups or head_num % groups:
        raise ValueError(
            f"head_num={head_num} is not a multiple of the {groups} heads of key {tuple(key.shape)}"
        )


def _check_masks(options: Options, layout: str) -> None:
    mode, mask = options.sparse_mode, options.atten_mask
    if mode not in range(9):
        raise ValueError(f"sparse_mode={mode}: use 0 to 8")
    if mode and mask is None:
        raise ValueError(f"sparse_mode={mode} needs atten_mask: without one every key is seen")
    if mask is not None and mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"atten_mask must be bool or uint8 (1 = excluded), got {mask.dtype}")
    if mode in (5, 6) and options.prefix is None:
        raise ValueError(f"sparse_mode={mode} needs prefix, one number a sequence")
    is_packed = layout == "TND"
    if (mode in (7, 8) and not is_packed) or (mode == 5 and is_packed):
        raise ValueError(f"sparse_mode={mode} does not go with input_layout={layout}")
    lengths = options.actual_seq_qlen, options.actual_seq_kvlen
    if is_packed and None in lengths:
        raise ValueError("input_layout=TND needs actual_seq_qlen and actual_seq_kvlen, cumulative")
