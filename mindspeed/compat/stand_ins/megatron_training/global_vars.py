"""The arguments of the run, where callbacks of scripts look for them."""

from __future__ import annotations

from argparse import Namespace

_current: list[Namespace] = []


def get_args() -> Namespace:
    """Return the arguments of the run that was started last."""
    if not _current:
        raise RuntimeError("there are no arguments yet: they are there once a run has started")
    return _current[0]


def set_args(args: Namespace) -> None:
    """Set the arguments of the run."""
    _current[:] = [args]
