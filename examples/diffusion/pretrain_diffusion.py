"""Train the diffusion transformer with FSDP2: a Dataset, a model, five small functions."""

from collections.abc import Iterator
from typing import Any

import torch
from diffusion import DiffusionTransformer
from torch.utils.data import DataLoader, Dataset

from mindspeed_mm.training import get_args, move_to_device, pretrain

SIDE = 16


class Discs(Dataset[dict[str, torch.Tensor]]):
    """Images of a disc, each with its noise and timestep."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """Return one sample, which depends on its index only."""
        generator = torch.Generator().manual_seed(number)
        centre, radius = (
            SIDE * torch.rand(2, generator=generator),
            2 + 4 * torch.rand(1, generator=generator),
        )
        grid = torch.stack(torch.meshgrid(*[torch.arange(SIDE)] * 2, indexing="ij"), -1)
        inside = ((grid - centre).norm(dim=-1) < radius).float()
        colour = torch.rand(3, generator=generator)
        return {
            "images": 2 * colour[:, None, None] * inside - 1,
            "noise": torch.randn(3, SIDE, SIDE, generator=generator),
            "timestep": torch.rand((), generator=generator),
        }


def model_provider(*args: Any, **kwargs: Any) -> DiffusionTransformer:
    """Build the model."""
    return DiffusionTransformer(SIDE)


def train_valid_test_datasets_provider() -> tuple[Any, Any, Any]:
    """Return data loaders."""
    return DataLoader(Discs(), get_args().micro_batch_size, shuffle=True), None, None


def get_batch(data_iterator: Iterator[Any]) -> dict[str, torch.Tensor]:
    """Move the next batch to the device."""
    return move_to_device(next(data_iterator))


def loss_func(output_tensor: torch.Tensor) -> torch.Tensor:
    """Return the loss, which is the output of the model."""
    return output_tensor


def forward_step(data_iterator: Iterator[Any], model: DiffusionTransformer) -> tuple[Any, Any]:
    """Run the model on a batch."""
    return model(**get_batch(data_iterator)), loss_func


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step)
