"""The load of all experts in a JSON line of a log: training writes it, plots read it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LAYERS, _SHARES = "moe layers", "moe load"


@dataclass(frozen=True)
class LoadTable:
    """The load of every expert over an interval, as a multiple of an even share."""

    iteration: int
    """The last step of the interval."""
    layers: list[int]
    """Numbers of the layers with experts, from 1 on."""
    shares: list[list[float]]
    """A row for each layer, an expert a column."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of the line."""
        rows = [[round(share, 4) for share in row] for row in self.shares]
        return {_LAYERS: self.layers, _SHARES: rows}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> LoadTable | None:
        """Return the table of a line, None where it has none; ValueError where it is damaged."""
        layers: Any = record.get(_LAYERS)
        shares: Any = record.get(_SHARES)
        if layers is None and shares is None:
            return None
        if not _is_table(layers, shares):
            raise ValueError("its load of experts is not a table")
        return cls(int(record["iteration"]), layers, shares)


def _is_table(layers: Any, shares: Any) -> bool:
    """Return whether shares is a row of finite numbers, equally many, for each layer."""
    if not (isinstance(layers, list) and isinstance(shares, list)):
        return False
    if not shares or len(layers) != len(shares) or not all(isinstance(n, int) for n in layers):
        return False
    if not all(isinstance(row, list) and row and len(row) == len(shares[0]) for row in shares):
        return False
    cells = [cell for row in shares for cell in row]
    return all(isinstance(cell, int | float) and math.isfinite(cell) for cell in cells)
