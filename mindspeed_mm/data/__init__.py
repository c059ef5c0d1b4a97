"""Conversations with images and videos to batches for transformers models."""

import importlib
from typing import TYPE_CHECKING, Any

from mindspeed_mm.data.options import DataConfig

if TYPE_CHECKING:
    from mindspeed_mm.data.dataloader import MicroBatchLoader, build_mm_dataloader
    from mindspeed_mm.data.dataset import ConversationDataset, build_mm_dataset

__all__ = [
    "ConversationDataset",
    "DataConfig",
    "MicroBatchLoader",
    "build_mm_dataloader",
    "build_mm_dataset",
]

_LATER = {
    "ConversationDataset": "dataset",
    "MicroBatchLoader": "dataloader",
    "build_mm_dataloader": "dataloader",
    "build_mm_dataset": "dataset",
}


def __getattr__(name: str) -> Any:
    # Loaded at first use: options are read, and `--help` is shown, without torch.
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
