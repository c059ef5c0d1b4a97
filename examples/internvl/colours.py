"""A user's Dataset: squares of one colour, and the name of the colour as the answer."""

import torch
from torch.utils.data import Dataset

SIDE, IMAGE_TOKENS = 16, 4
BEGIN, END, QUESTION, IMAGE = 1, 2, 3, 4
FIRST_COLOUR, COLOURS = 8, 6
VOCABULARY = FIRST_COLOUR + COLOURS


class Colours(Dataset[dict[str, torch.Tensor]]):
    """Image, question, answer; only the answer has a loss."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """Return one sample, which depends on its index only."""
        generator = torch.Generator().manual_seed(number)
        colour = int(torch.randint(COLOURS, (), generator=generator))
        channels = torch.tensor([colour & 1, colour >> 1 & 1, colour >> 2 & 1]).float()
        noise = 0.1 * torch.randn(3, SIDE, SIDE, generator=generator)
        tokens = torch.tensor(
            [BEGIN, *[IMAGE] * IMAGE_TOKENS, QUESTION, FIRST_COLOUR + colour, END]
        )
        labels = torch.full_like(tokens, -100)
        labels[-2:] = tokens[-2:]
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "labels": labels,
            "pixel_values": channels[:, None, None] + noise,
        }
