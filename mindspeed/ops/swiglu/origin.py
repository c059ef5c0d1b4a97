"""Notes on tensors around SwiGLU: what an output was computed from, and what is computed already.

The product behind SwiGLU would rather compute it again than keep it; the one before may have done
it along with its own output.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_ORIGIN, _RESULT = "swiglu_origin", "swiglu_result"


def remember(y: Tensor, x: Tensor) -> Tensor:
    """Note on y that it is swiglu(x), for backward; what is made of y does not inherit the note."""
    if y.requires_grad:
        setattr(y, _ORIGIN, (x, y._version))
    return y


def origin(y: Tensor) -> Tensor | None:
    """Return the x of which y is swiglu(x), unless y was changed since or nobody noted it."""
    noted: tuple[Tensor, int] | None = getattr(y, _ORIGIN, None)
    return noted[0] if noted is not None and noted[1] == y._version else None


def remember_ahead(x: Tensor, y: Tensor) -> Tensor:
    """Note on x that y is swiglu(x), for the one who asks for it next."""
    setattr(x, _RESULT, (y, _version(x)))
    return x


def take_ahead(x: Tensor) -> Tensor | None:
    """Return the y that is swiglu(x) if it was noted, and forget it: x is kept for backward."""
    noted: tuple[Tensor, int] | None = getattr(x, _RESULT, None)
    if noted is None:
        return None
    delattr(x, _RESULT)
    return noted[0] if noted[1] == _version(x) else None


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version  # inference mode does not count


class Ahead:
    """While entered: whether a product is to compute SwiGLU, and the pairs that it returned.

    A module holds one, since attributes of its own would take longer to set.
    """

    __slots__ = ("is_wanted", "pairs")

    def __init__(self) -> None:
        self.is_wanted = False
        self.pairs: Tensor | None = None

    def __enter__(self) -> None:
        """Leave what was wanted as it is."""

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Complain where nobody asked for the SwiGLU of the pairs."""
        pairs, self.pairs, self.is_wanted = self.pairs, None, False
        is_left = pairs is not None and take_ahead(pairs) is not None
        if is_left and kind in (None, RuntimeError):  # sizes that do not fit, but no lack of memory
            raise RuntimeError(
                "something between the first product of an MLP and its SwiGLU replaced the "
                "tensor: turn swiglu_in_product off for this model"
            )
