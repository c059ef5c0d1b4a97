"""The two factors of an adapter: parameters of their own, and the values they begin with."""

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.adapters import Factors


class Adapter(nn.Module):
    """The adapters of one layer, which adds what they make of its input."""

    hf_names: set[str]
    """The HF projections that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.is_used = True
        """Whether the layer adds what the adapters make of its input."""


class Factor(nn.Module):
    """A weight that is asked for by a call, so that hooks that bring it can run before."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> Tensor:
        """Return the weight."""
        return self.weight


def first_values(
    name: str,
    size: tuple[int, int],
    rank: int,
    seed: int,
    loaded: Mapping[str, Factors] | None,
) -> Factors:
    """Return the initial factors; new ones depend on the name and the seed only."""
    rows, columns = size
    if loaded is not None:
        if name not in loaded:
            raise ConfigError(f"--lora-load: has no adapter for {name}: it is of another model")
        a, b = loaded[name]
        if a.shape != (rank, columns) or b.shape != (rows, rank):
            raise ConfigError(
                f"--lora-load: the adapter for {name} is {tuple(b.shape)} x {tuple(a.shape)}, not "
                f"{(rows, rank)} x {(rank, columns)}"
            )
        return a, b
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    bound = 1 / math.sqrt(columns)
    a = torch.empty(rank, columns).uniform_(-bound, bound, generator=generator)
    return a, torch.zeros(rows, rank)
