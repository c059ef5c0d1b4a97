"""Samples to the tensors of a micro-batch, named and shaped as a transformers model takes them.

Shapes: (B, S), or (1, S) for packed samples, whose positions begin again with each of them. Labels
are not shifted: transformers does that. What is not trained has the label -100.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mindspeed.config import ConfigError
from mindspeed_llm.data.indexed import IGNORED, Array
from mindspeed_mm.data.encoding import Sample, concatenate, media_sample, text_sample
from mindspeed_mm.data.media import Kind
from mindspeed_mm.data.positions import PositionCounter
from mindspeed_mm.data.processor import MediaProcessor

Batch = dict[str, torch.Tensor]
SIZES = {"image_sizes", "pixel_attention_mask"}
"""Tensors that tell a model which part of `pixel_values` is image."""


class Collator:
    """Makes micro-batches of one shape of calls: all ranks run the same parts of a model.

    Every batch holds a medium of every kind that the data has; where it has none, a blank one
    stands in, which nothing attends to. Else one rank would gather the weights of an image encoder
    that the other ranks do not use, and wait for ever.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        kinds: frozenset[Kind],
        *,
        multiple: int = 8,
        positions: PositionCounter | None = None,
    ) -> None:
        self._processor, self._kinds, self._multiple = processor, sorted(kinds), multiple
        self._positions = positions
        self._pad_id = processor.facts.pad_id

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Join samples, which may be none: then there is a batch with nothing to learn."""
        filled = list(samples) or [text_sample(np.array([self._pad_id]), is_learnt=False)]
        stand_ins = [
            media_sample(self._processor.blank(kind), kind, is_attended=False)
            for kind in self._kinds
            if not any(kind in sample.kinds for sample in filled)
        ]
        if self._positions is not None:
            return self._packed([*filled, *stand_ins], self._positions)
        filled[-1] = concatenate([filled[-1], *stand_ins])
        return self._padded(filled)

    def _padded(self, samples: Sequence[Sample]) -> Batch:
        size = self._rounded(max(map(len, samples)))
        batch = {
            "input_ids": _rows([sample.ids for sample in samples], size, self._pad_id),
            "attention_mask": _rows([sample.attended for sample in samples], size, 0),
            "labels": _rows([sample.labels for sample in samples], size, IGNORED),
        }
        whole = concatenate(samples)
        for name in whole.marks:
            rows = [sample.marks.get(name, np.zeros_like(sample.ids)) for sample in samples]
            batch[name] = _rows(rows, size, 0)
        return batch | _media(whole.tensors)

    def _packed(self, samples: Sequence[Sample], positions: PositionCounter) -> Batch:
        """Put samples in one row; padding is a sample of its own."""
        size = sum(map(len, samples))
        padding = self._rounded(size) - size
        if padding:
            samples = [*samples, text_sample(np.full(padding, self._pad_id), is_learnt=False)]
        whole = concatenate(samples)
        labels = whole.labels.copy()
        labels[np.cumsum([0, *map(len, samples[:-1])])] = IGNORED  # nobody sees what comes before
        return {
            "input_ids": torch.from_numpy(whole.ids)[None],
            "labels": torch.from_numpy(labels)[None],
            "position_ids": torch.cat([positions(sample) for sample in samples], dim=-1),
            **{name: torch.from_numpy(mark)[None] for name, mark in whole.marks.items()},
            **_media(whole.tensors),
        }

    def _rounded(self, size: int) -> int:
        return -(-size // self._multiple) * self._multiple


def _rows(rows: Sequence[Array], size: int, filling: int) -> torch.Tensor:
    found = np.full((len(rows), size), filling, np.int64)
    for place, row in zip(found, rows):
        place[: len(row)] = row
    return torch.from_numpy(found)


def _media(tensors: Mapping[str, Sequence[torch.Tensor]]) -> Batch:
    has_sizes = not SIZES.isdisjoint(tensors)
    return {name: _join(name, found, has_sizes) for name, found in tensors.items()}


def _join(name: str, tensors: Sequence[torch.Tensor], has_sizes: bool) -> torch.Tensor:
    """Join media; where the model gets the size of each, smaller ones are filled up with 0."""
    shapes = {tensor.shape[1:] for tensor in tensors}
    if len(shapes) == 1:
        return torch.cat(list(tensors))
    if not has_sizes or len({len(shape) for shape in shapes}) > 1:
        raise ConfigError(
            f"images of one batch give {name} of different shapes, which this processor does not "
            "tell the model: use a micro-batch size of 1"
        )
    largest = [max(sizes) for sizes in zip(*shapes)]
    joined = tensors[0].new_zeros(sum(map(len, tensors)), *largest)
    place = 0
    for tensor in tensors:
        region: tuple[Any, ...] = tuple(slice(size) for size in tensor.shape[1:])
        joined[(slice(place, place + len(tensor)), *region)] = tensor
        place += len(tensor)
    return joined
