"""The base class of multimodal models."""

from typing import Any

from torch import nn


class MultiModalModule(nn.Module):
    """A torch module with its config."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config

    def unwrapped(self) -> nn.Module:
        """Return the model whose parameter names are those of weight files."""
        return self
