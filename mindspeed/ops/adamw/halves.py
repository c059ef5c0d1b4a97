"""float32 weights kept as the bfloat16 that the model uses and 16 bits more, losing nothing.

The bits of the weight are (bits of the bfloat16 << 16) + remainder, and the bfloat16 is the nearest
one, ties to even, as `.to(bfloat16)` rounds. An even bfloat16 is nearest to 65537 float32 numbers,
from -32768 to 32768 around it, one more than 16 bits tell apart: both ends are stored as -32768. A
mark says which end it is; it lies in the sign bit of the second moment, which is never negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def split_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nearest bfloat16, the int16 remainder, and the mark: whether that is +32768."""
    bits = weight.contiguous().view(torch.int32)
    high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding may turn the bits of a NaN into those of infinity: it stays a NaN, with no remainder.
    is_nan = weight.isnan()
    high = torch.where(is_nan, (bits >> 16) | 0x40, high)
    remainder = torch.where(is_nan, 0, bits - (high << 16))
    param = high.to(torch.int16).view(torch.bfloat16)
    return param, remainder.to(torch.int16), remainder == 0x8000


def join_weight(param: Tensor, remainder: Tensor, is_above: Tensor) -> Tensor:
    """Return the float32 weights that `split_weight` took apart."""
    high = param.contiguous().view(torch.int16).to(torch.int32)
    low = remainder.to(torch.int32) + (is_above.to(torch.int32) << 16)
    return ((high << 16) + low).view(torch.float32)


def marks_of(moment: Tensor) -> Tensor:
    """Return the marks in the sign bits of a second moment, of any dtype."""
    return _bits(moment) < 0


def set_marks(moment: Tensor, marks: Tensor) -> None:
    """Put marks into the sign bits of a second moment, in place."""
    bits = _bits(moment)
    sign = torch.iinfo(bits.dtype).min
    bits.bitwise_and_(~sign).bitwise_or_(torch.where(marks, sign, 0).to(bits.dtype))


def without_marks(moment: Tensor) -> Tensor:
    """Return a second moment without its marks."""
    bits = _bits(moment)
    return (bits & ~torch.iinfo(bits.dtype).min).view(moment.dtype)


def _bits(moment: Tensor) -> Tensor:
    return moment.view(_INTEGERS[moment.element_size()])
