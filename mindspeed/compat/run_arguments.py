"""The arguments of the run, where callbacks of scripts look for them."""

from __future__ import annotations

from argparse import Namespace

_found: list[Namespace] = []


def get_args() -> Namespace:
    """Return the arguments of the run that was started last."""
    if not _found:
        raise RuntimeError("there are no arguments yet: they are there once a run has started")
    return _found[0]


def set_args(args: Namespace) -> None:
    """Say what the arguments of the run are."""
    _found[:] = [args]
