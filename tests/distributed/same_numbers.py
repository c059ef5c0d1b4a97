"""Random numbers that every rank draws alike."""

import torch


def shared(seed, *shape):
    """Return the same numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
