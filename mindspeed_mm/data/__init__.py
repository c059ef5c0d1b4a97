"""Conversations with images and videos to batches for transformers models."""

from mindspeed_mm.data.dataloader import MicroBatchLoader, build_mm_dataloader
from mindspeed_mm.data.dataset import ConversationDataset, build_mm_dataset
from mindspeed_mm.data.options import DataConfig

__all__ = [
    "ConversationDataset",
    "DataConfig",
    "MicroBatchLoader",
    "build_mm_dataloader",
    "build_mm_dataset",
]
