"""Packed documents that begin with rows of another document: their common prefix is there once.

The queries of such a document are its own rows, its keys those of the prefix and then its own:
cu_seqlens_kv counts more than cu_seqlens_q. Keys and values are computed and rotated once, since a
row has the same position in every document; attention copies them to where documents need them.
T rows, R keys of all documents, N heads, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mindspeed.ops.packed_batch import register
from mindspeed.ops.token_rows import spread_rows

Prefix = tuple[int, int]
"""Where the prefix of a document begins, and its length; (0, 0) for none."""


@dataclass(frozen=True)
class KeyRows:
    """Where the key and value of each row go, as `spread_rows` takes it."""

    row_ids: Tensor
    """(R,), those of row t from starts[t] to starts[t + 1]"""
    starts: Tensor
    """(T + 1,)"""

    @classmethod
    def of(cls, bounds: Sequence[int], prefixes: Sequence[Prefix]) -> KeyRows:
        """Derive them, on the host, from the rows and the prefix of each document."""
        pieces = []
        for (start, end), (first, length) in zip(pairwise(bounds), prefixes, strict=True):
            pieces += [torch.arange(first, first + length), torch.arange(start, end)]
        source = torch.cat(pieces)
        counts = torch.bincount(source, minlength=bounds[-1])
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        row_ids = torch.argsort(source, stable=True)
        return cls(row_ids.to(torch.int32), starts.to(torch.int32))

    def spread(self, x: Tensor) -> Tensor:
        """Copy keys or values (T, N, H) to (R, N, H); a gradient is the sum, in a fixed order."""
        copies = spread_rows(x.flatten(1), self.row_ids, len(self.row_ids), self.starts)
        return copies.unflatten(1, x.shape[1:])


def key_bounds(bounds: Sequence[int], prefixes: Sequence[Prefix]) -> Tensor:
    """Return the cumulative lengths of the keys of documents, prefixes included."""
    lengths = torch.tensor(bounds).diff() + torch.tensor([length for _, length in prefixes])
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def register_prefixes(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, rows: KeyRows, positions: Tensor
) -> None:
    """Say for a batch, by its cumulative lengths, where keys come from and where rows are (T,)."""
    register(cu_seqlens_q, positions=positions)
    register(cu_seqlens_kv, positions=positions, key_rows=rows)
