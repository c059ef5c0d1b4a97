"""The lengths of the packed sequences of a batch, which verl hands over before each forward."""

from contextvars import ContextVar

from torch import Tensor

__all__ = ["get_actual_seq_len", "set_actual_seq_len"]

_lengths: ContextVar[Tensor | None] = ContextVar("actual_seq_len", default=None)


def set_actual_seq_len(actual_seq_len: Tensor | None) -> None:
    """Keep the cumulative lengths of the batch at hand.

    Attention does not need them: the same boundaries reach it in Megatron's PackedSeqParams.
    """
    _lengths.set(actual_seq_len)


def get_actual_seq_len() -> Tensor | None:
    """Return what was set last in this thread, or None."""
    return _lengths.get()
