"""What a SwiGLU output was computed from, for a product that would rather compute it again."""

from __future__ import annotations

from torch import Tensor

_ORIGIN = "swiglu_origin"


def remember(y: Tensor, x: Tensor) -> Tensor:
    """Note on y that it is swiglu(x), for backward; what is made of y does not inherit the note."""
    if y.requires_grad:
        setattr(y, _ORIGIN, (x, y._version))
    return y


def origin(y: Tensor) -> Tensor | None:
    """Return the x of which y is swiglu(x), unless y was changed since or nobody noted it."""
    noted: tuple[Tensor, int] | None = getattr(y, _ORIGIN, None)
    return noted[0] if noted is not None and noted[1] == y._version else None
