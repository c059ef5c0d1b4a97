"""The process to which Megatron's writers of a checkpoint report, made to live as its rank does."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from multiprocessing.managers import SyncManager
from typing import Any

from mindspeed.launch.process import ignore_requests_to_stop, leave_with_parent


def wrap_prepare_write_data(original: Callable[..., None]) -> Callable[..., None]:
    """Start the process before Megatron does.

    Megatron's would end by a SIGTERM for all processes of a run, which is how runs are stopped, so
    that the save which follows fails; and it would stay behind when its rank is killed.
    """

    @functools.wraps(original)
    def prepare_write_data(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        if filesystem_async._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
            manager.start(_live_as_the_rank)
            filesystem_async._results_queue = manager.Queue()
        original(self, *args, **kwargs)

    return prepare_write_data


def _live_as_the_rank() -> None:
    ignore_requests_to_stop()
    leave_with_parent()
