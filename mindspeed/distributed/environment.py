"""Read the rank and the world size that the launcher (torchrun, mindspeed run) set.

The only reader of these variables. It needs nothing but the standard library, so that commands
that never load torch, and the device layer below the process groups, can ask as well.
"""

import os


def rank() -> int:
    """Return the rank of this process among all ranks; 0 without a launcher."""
    return _integer("RANK", 0)


def world_size() -> int:
    """Return the number of ranks; 1 without a launcher."""
    return _integer("WORLD_SIZE", 1)


def local_rank() -> int:
    """Return the rank of this process on this machine; 0 without a launcher."""
    return _integer("LOCAL_RANK", 0)


def local_world_size() -> int:
    """Return the number of ranks on this machine: all ranks unless the launcher set it."""
    return _integer("LOCAL_WORLD_SIZE", world_size())


def is_rank_zero() -> bool:
    """Return whether this is the first of all ranks."""
    return rank() == 0


def is_local_rank_zero() -> bool:
    """Return whether this is the first rank of its machine; without LOCAL_RANK the first of all."""
    return _integer("LOCAL_RANK", rank()) == 0


def _integer(name: str, default: int) -> int:
    value = os.environ.get(name)
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise RuntimeError(
            f"environment variable {name}={value} is not an integer: start the ranks with torchrun "
            f"or mindspeed run, or unset {name}"
        ) from None
