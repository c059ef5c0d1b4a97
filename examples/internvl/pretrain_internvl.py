"""Steps 2 and 3 of 3: register the class, build it by its id, and write the five callbacks."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from colours import Colours
from internvl3_5 import InternVLChatModelGeneration
from torch.utils.data import DataLoader

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.training import get_args, move_to_device, pretrain

ModelHub.MODEL_MAPPINGS["internvl"] = InternVLChatModelGeneration


def model_provider(*args: Any, **kwargs: Any) -> TransformersModel:
    """Build the model of --mm-model."""
    vlm_config = deepcopy(get_args().mm.model)
    return TransformersModel(vlm_config)


def train_valid_test_datasets_provider() -> tuple[Any, Any, Any]:
    """Return data loaders over an unchanged Dataset."""
    size = get_args().micro_batch_size
    return DataLoader(Colours(256), size, shuffle=True), DataLoader(Colours(32), size), None


def get_batch(data_iterator: Iterator[Any]) -> dict[str, torch.Tensor]:
    """Move the next batch to the device."""
    return move_to_device(next(data_iterator), get_args().params_dtype)


def loss_func(output_tensor: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss, which the model computed from the labels."""
    return output_tensor["loss"]


def forward_step(data_iterator: Iterator[Any], model: TransformersModel) -> tuple[Any, Any]:
    """Run the model on a batch."""
    batch = get_batch(data_iterator)
    return model(**batch), loss_func


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step)
