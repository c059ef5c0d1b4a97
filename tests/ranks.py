"""Run a test function in several gloo ranks of this machine."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mindspeed.launch import RankFailed, call

__all__ = ["RankFailed", "group_time_outs", "run_ranks"]

_PRELOAD = "tests.preload"


def run_ranks(
    function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 300
) -> list[Any]:
    """Call function(*arguments) in each of world ranks and return their values, rank 0's first.

    function lives at the top of a module. RANK, LOCAL_RANK and WORLD_SIZE are set, the adaptor is
    imported and torch.distributed is ready. The first rank to fail is raised as RankFailed.
    """
    return call(_in_group, world, function, arguments, timeout, timeout=timeout, preload=[_PRELOAD])


def group_time_outs() -> set[float]:
    """Return the time-outs of all groups that this rank is in, in seconds."""
    import torch
    from torch.distributed import distributed_c10d

    groups = distributed_c10d._world.pg_map
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return {backend.options._timeout.total_seconds() for backend in backends}


def _in_group(function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> Any:
    import torch.distributed

    import tests.preload  # noqa: F401  # already there, unless the server could not import it

    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    torch.distributed.barrier()  # else one may leave before another has met it
    value = function(*arguments)
    torch.distributed.destroy_process_group()
    return value
