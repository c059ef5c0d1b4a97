"""Positions of the tokens of packed samples, counted as the model itself counts them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from mindspeed_mm.data.encoding import Sample
from mindspeed_mm.models.skeleton import build_skeleton

COUNTER = "get_rope_index"
"""The method by which models with positions in time, height and width count them."""


class PositionCounter:
    """Counts from 0 for every sample: (1, S), or (4, 1, S) for models that also see space."""

    def __init__(self, folder: str) -> None:
        self._count = _counter(build_skeleton(folder))
        self._takes = set(inspect.signature(self._count).parameters) if self._count else set()

    def __call__(self, sample: Sample) -> torch.Tensor:
        """Return the positions of one sample."""
        plain = torch.arange(len(sample))[None]
        if self._count is None:
            return plain
        given: dict[str, Any] = {name: torch.cat(found) for name, found in sample.tensors.items()}
        given |= {name: torch.from_numpy(mark)[None] for name, mark in sample.marks.items()}
        given |= {"input_ids": torch.from_numpy(sample.ids)[None]}
        given.setdefault("mm_token_type_ids", torch.zeros_like(plain))
        taken = {name: value for name, value in given.items() if name in self._takes}
        spatial, _ = self._count(**taken)
        return torch.cat([plain[None], spatial])


def _counter(model: nn.Module) -> Any:
    """Return the method of the model, or of the part of it, that counts; None if none does."""
    for module in model.modules():
        if hasattr(module, COUNTER):
            return getattr(module, COUNTER)
    return None
