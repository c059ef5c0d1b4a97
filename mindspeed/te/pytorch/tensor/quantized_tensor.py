"""Base class of the quantized tensor classes."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from mindspeed.te.pytorch.fp8 import refuse


class QuantizedTensor(torch.Tensor):
    """A tensor of few bits and its scales; none can be made here."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: there is no FP8 on this device."""
        refuse(cls.__name__)
