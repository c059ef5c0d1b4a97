"""The base class of multimodal models."""

from typing import Any

from torch import nn


class MultiModalModule(nn.Module):
    """A torch module that keeps its configuration."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config

    def unwrapped(self) -> nn.Module:
        """Return the model whose parameters have the names that files of weights give them."""
        return self
