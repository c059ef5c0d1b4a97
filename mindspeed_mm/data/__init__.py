"""Conversations with images and videos to batches for transformers models."""

from typing import TYPE_CHECKING

from mindspeed.lazy_import import lazy_names
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

# Options are read, and `--help` is shown, without torch.
__getattr__ = lazy_names(
    __name__,
    {
        "ConversationDataset": "dataset",
        "MicroBatchLoader": "dataloader",
        "build_mm_dataloader": "dataloader",
        "build_mm_dataset": "dataset",
    },
)
