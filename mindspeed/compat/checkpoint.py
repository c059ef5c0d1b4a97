"""Distributed checkpoints: megatron-core 0.12 on newer torch, and writers of a stopped run.

Megatron's writers report to a process of their own; `wrap_prepare_write_data` makes it live as long
as its rank does.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import multiprocessing
from collections.abc import Callable
from multiprocessing.managers import SyncManager
from typing import Any

from mindspeed.launch.process import exit_with_parent, ignore_stop_signals

FORMAT = "serialization_format"


def wrap_write_item(original: Callable[..., Any]) -> Callable[..., Any]:
    """Default to the format that torch used before it required one."""
    signature = inspect.signature(original)
    if FORMAT not in signature.parameters:
        return original
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    @functools.wraps(original)
    def _write_item(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs)
        given.arguments.setdefault(FORMAT, SerializationFormat.TORCH_SAVE)
        return original(*given.args, **given.kwargs)

    return _write_item


def wrap_finish(original: Callable[..., Any]) -> Callable[..., Any]:
    """Write what Megatron adds to the metadata also where torch copies the declared fields only."""
    from torch.distributed.checkpoint.metadata import Metadata

    declared = {field.name for field in dataclasses.fields(Metadata)}

    @functools.wraps(original)
    def finish(self: Any, metadata: Metadata, results: Any) -> Any:
        added = {name: value for name, value in vars(metadata).items() if name not in declared}

        class Kept(Metadata):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                vars(self).update(added)

            def __reduce_ex__(self, protocol: Any) -> Any:
                self.__class__ = Metadata  # type: ignore[assignment]  # the file must not name Kept
                return self.__reduce_ex__(protocol)

        metadata.__class__ = Kept
        try:
            return original(self, metadata, results)
        finally:
            metadata.__class__ = Metadata

    return finish


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
    ignore_stop_signals()
    exit_with_parent()
