"""The position ids of a packed batch; the module has the name under which verl imports it."""

from contextvars import ContextVar

from torch import Tensor

__all__ = ["get_position_ids", "set_position_ids"]

_positions: ContextVar[Tensor | None] = ContextVar("position_ids", default=None)


def set_position_ids(position_ids: Tensor | None) -> None:
    """Keep the position ids (sequence, batch) of the batch at hand.

    Rotary embedding does not need them: it counts from the boundaries in PackedSeqParams.
    """
    _positions.set(position_ids)


def get_position_ids() -> Tensor | None:
    """Return what was set last in this thread, or None."""
    return _positions.get()
