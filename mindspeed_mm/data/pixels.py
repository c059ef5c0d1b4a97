"""Any image of Pillow as 8-bit RGB, as a viewer would show it: Pillow alone clips wide values."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

BYTE, WORD = 255, 65535
PER_BYTE = WORD // BYTE
"""Steps of 16 bits in one of 8 bits."""


def as_rgb(image: Image.Image) -> Image.Image:
    """Scale 16-bit and floating values to 8 bits, put what is transparent on white."""
    if image.mode.startswith("I"):
        return _grey(_from_words(np.asarray(image)))
    if image.mode == "F":
        return _grey(_from_floats(np.asarray(image)))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, "white")
        return Image.alpha_composite(white, coloured).convert("RGB")
    return image.convert("RGB")


def _from_words(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Scale 16 bits; files of 16 bits may come as 32-bit integers."""
    if values.size and (values.min() < 0 or values.max() > WORD):
        raise ValueError(
            f"its integers reach from {values.min()} to {values.max()}: save it with 8 or 16 bits"
        )
    return (values.astype(np.int64) + PER_BYTE // 2) // PER_BYTE


def _from_floats(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Scale what lies within 0 and 1; what lies within 0 and 255 is taken as it is."""
    if not np.isfinite(values).all() or (values.size and (values.min() < 0 or values.max() > BYTE)):
        raise ValueError(
            "its floating values are not within 0 and 1, or 0 and 255: save it with 8 bits"
        )
    return np.rint(values * BYTE if values.size and values.max() <= 1 else values)


def _grey(values: np.ndarray[Any, Any]) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")
