"""Collate samples into the tensors of a micro-batch, as a transformers model takes them.

Shapes: (B, S), or (1, S) for packed samples, whose positions restart with each sample. Labels are
not shifted: transformers does that. Tokens without a loss have the label -100.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from mindspeed.config import ConfigError
from mindspeed_llm.data.indexed import IGNORE_INDEX, Array
from mindspeed_mm.data.encoding import Sample, concatenate, media_sample, text_sample
from mindspeed_mm.data.media import Modality
from mindspeed_mm.data.processor import MediaProcessor
from mindspeed_mm.models.meta_device import build_meta_model

Batch = dict[str, torch.Tensor]
SIZES = {"image_sizes", "pixel_attention_mask"}
"""Tensors from which a model knows which part of `pixel_values` is image."""
ROPE_INDEX = "get_rope_index"
"""The method by which models with multimodal RoPE compute positions (time, height, width)."""


class Collator:
    """Makes micro-batches for which all ranks run the same parts of a model.

    Every batch has media of every modality that occurs in the data; a batch without one gets a
    blank image or video that no token attends to. Otherwise one rank would gather the weights of an
    image encoder that the other ranks do not use, and deadlock.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        modalities: frozenset[Modality],
        *,
        multiple: int = 8,
        position_ids: PositionIds | None = None,
    ) -> None:
        self._processor, self._modalities = processor, sorted(modalities)
        self._multiple, self._position_ids = multiple, position_ids
        self._pad_id = processor.facts.pad_id

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples; without any the batch has no loss."""
        filled = list(samples) or [text_sample(np.array([self._pad_id]), is_trained=False)]
        blanks = [
            media_sample(self._processor.blank(modality), modality, is_attended=False)
            for modality in self._modalities
            if not any(modality in sample.modalities for sample in filled)
        ]
        if self._position_ids is not None:
            return self._packed([*filled, *blanks], self._position_ids)
        filled[-1] = concatenate([filled[-1], *blanks])
        return self._padded(filled)

    def _padded(self, samples: Sequence[Sample]) -> Batch:
        size = self._rounded(max(map(len, samples)))
        batch = {
            "input_ids": _rows([sample.ids for sample in samples], size, self._pad_id),
            "attention_mask": _rows([sample.attention_mask for sample in samples], size, 0),
            "labels": _rows([sample.labels for sample in samples], size, IGNORE_INDEX),
        }
        whole = concatenate(samples)
        for name in whole.token_types:
            rows = [sample.token_types.get(name, np.zeros_like(sample.ids)) for sample in samples]
            batch[name] = _rows(rows, size, 0)
        return batch | _media(whole.tensors)

    def _packed(self, samples: Sequence[Sample], position_ids: PositionIds) -> Batch:
        """Pack samples into one row; padding is a sample of its own."""
        size = sum(map(len, samples))
        padding = self._rounded(size) - size
        if padding:
            samples = [*samples, text_sample(np.full(padding, self._pad_id), is_trained=False)]
        whole = concatenate(samples)
        labels = whole.labels.copy()
        labels[np.cumsum([0, *map(len, samples[:-1])])] = IGNORE_INDEX  # no token precedes these
        return {
            "input_ids": torch.from_numpy(whole.ids)[None],
            "labels": torch.from_numpy(labels)[None],
            "position_ids": torch.cat([position_ids(sample) for sample in samples], dim=-1),
            **{name: torch.from_numpy(types)[None] for name, types in whole.token_types.items()},
            **_media(whole.tensors),
        }

    def _rounded(self, size: int) -> int:
        return -(-size // self._multiple) * self._multiple


def _rows(rows: Sequence[Array], size: int, pad: int) -> torch.Tensor:
    padded = np.full((len(rows), size), pad, np.int64)
    for target, row in zip(padded, rows):
        target[: len(row)] = row
    return torch.from_numpy(padded)


def _media(tensors: Mapping[str, Sequence[torch.Tensor]]) -> Batch:
    has_sizes = not SIZES.isdisjoint(tensors)
    return {name: _concatenate(name, found, has_sizes) for name, found in tensors.items()}


def _concatenate(name: str, tensors: Sequence[torch.Tensor], has_sizes: bool) -> torch.Tensor:
    """Concatenate media; if the model gets the size of each, smaller ones are padded with 0."""
    shapes = {tensor.shape[1:] for tensor in tensors}
    if len(shapes) == 1:
        return torch.cat(list(tensors))
    if not has_sizes or len({len(shape) for shape in shapes}) > 1:
        raise ConfigError(
            f"images of one batch have {name} of different shapes, and this processor does not "
            "pass their sizes to the model: use a micro-batch size of 1"
        )
    largest = [max(sizes) for sizes in zip(*shapes)]
    joined = tensors[0].new_zeros(sum(map(len, tensors)), *largest)
    start = 0
    for tensor in tensors:
        region: tuple[Any, ...] = tuple(slice(size) for size in tensor.shape[1:])
        joined[(slice(start, start + len(tensor)), *region)] = tensor
        start += len(tensor)
    return joined


class PositionIds:
    """Position ids of a packed sample, from 0: (1, S), or (4, 1, S) with multimodal RoPE."""

    def __init__(self, folder: str) -> None:
        self._rope_index = _rope_index(build_meta_model(folder))
        method = self._rope_index
        self._parameters = set(inspect.signature(method).parameters) if method else set()

    def __call__(self, sample: Sample) -> torch.Tensor:
        """Return the position ids of one sample."""
        plain = torch.arange(len(sample))[None]
        if self._rope_index is None:
            return plain
        inputs: dict[str, Any] = {name: torch.cat(found) for name, found in sample.tensors.items()}
        inputs |= {name: torch.from_numpy(t)[None] for name, t in sample.token_types.items()}
        inputs |= {"input_ids": torch.from_numpy(sample.ids)[None]}
        inputs.setdefault("mm_token_type_ids", torch.zeros_like(plain))
        accepted = {name: value for name, value in inputs.items() if name in self._parameters}
        spatial, _ = self._rope_index(**accepted)
        return torch.cat([plain[None], spatial])


def _rope_index(model: nn.Module) -> Any:
    """Return get_rope_index of the model or of a submodule, None without one."""
    for module in model.modules():
        if hasattr(module, ROPE_INDEX):
            return getattr(module, ROPE_INDEX)
    return None
