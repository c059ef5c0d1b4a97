"""What is known of packed documents, by the tensor of their cumulative lengths.

It cannot come as an argument: Megatron passes on the fields of its own PackedSeqParams only (0.12
to 0.16), not those of a subclass, and its other fields have a meaning elsewhere (rotary embeddings
read cu_seqlens_*_padded on the device). Every layer of a step gets the same tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_batches: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class PackedBatch:
    """What layers need to know of documents; None where nothing was registered."""

    version: int = -1
    bounds: list[int] | None = None
    """The cumulative lengths on the host, so that no layer waits for the device to read them."""
    positions: Tensor | None = None
    """Where each token is in its document, (T,), if documents do not all begin at 0."""
    computed_positions: Tensor | None = None
    """The same where they do, which the first layer computes."""
    key_rows: Any = None
    """Where keys come from, if documents share a prefix: `KeyRows` of te/pytorch/attention."""


def describe(cu_seqlens: Tensor) -> PackedBatch:
    """Return what is registered for these cumulative lengths, unless they have changed since."""
    batch: PackedBatch = _batches.get(cu_seqlens, PackedBatch())
    # Tensors of inference mode do not count their changes: nothing is kept for them.
    is_same = not cu_seqlens.is_inference() and batch.version == cu_seqlens._version
    return batch if is_same else PackedBatch()


def register(cu_seqlens: Tensor, **known: Any) -> None:
    """Add fields to the description of these documents; a tensor of inference mode gets none."""
    if cu_seqlens.is_inference():
        return
    version = cu_seqlens._version
    _batches[cu_seqlens] = replace(describe(cu_seqlens), version=version, **known)


def host_bounds(bounds: Tensor) -> list[int]:
    """Return cumulative lengths as registered, or read them from the device and register them."""
    values = describe(bounds).bounds
    if values is None:
        values = bounds.tolist()
        register(bounds, bounds=values)
    return values
