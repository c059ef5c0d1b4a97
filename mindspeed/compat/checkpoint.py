"""Distributed checkpoints: megatron-core 0.12 on newer torch, writers of a stopped run, padding.

Megatron's writers report to a process of their own; `wrap_prepare_write_data` does without it.
The distributed optimizer pads the buckets of its buffers, gathers its state without that padding,
and cuts out each parameter where it is with it; `wrap_optimizer_state` gives the places without.
That of 0.12 reads pieces of a vocabulary by the numbers of ranks, whatever its padding is;
`wrap_reformulate` reads them by their rows.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import os
import pickle
import queue
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from typing import IO, Any

import torch

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
    """Give each save a file for its results instead of a process that serves a queue.

    Megatron's process costs every rank the start of an interpreter in its first save. It would end
    by a SIGTERM for all processes of a run, which is how runs are stopped, so that the save which
    follows fails; and it would stay behind when its rank is killed.
    """

    @functools.wraps(original)
    def prepare_write_data(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        filesystem_async._results_queue = ResultFile()
        original(self, *args, **kwargs)

    return prepare_write_data


def wrap_optimizer_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Save the state of each parameter from where it is in buffers without padding."""

    @functools.wraps(original)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _places_without_padding(getattr(self, "buffers", ())):  # FSDP has none
            return original(self, *args, **kwargs)

    return sharded_state_dict


@contextmanager
def _places_without_padding(buffers: Any) -> Iterator[None]:
    places = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        padding = [0]  # before each bucket
        for bucket in buffer.buckets:
            padding.append(padding[-1] + bucket.grad_data.numel() - bucket.numel_unpadded)
        buffer.param_index_map = {
            parameter: (start - padding[bucket], end - padding[bucket], bucket)
            for parameter, (start, end, bucket) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, before in zip(buffers, places, strict=True):
            buffer.param_index_map = before


def wrap_reformulate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Load the pieces of a tensor that hold a rank's part, where the saved one has other padding.

    What the saved one does not have is zero.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    @functools.wraps(original)
    def reformulate(sh_ten: Any, reformulation_metadata: Any) -> Any:
        saved = reformulation_metadata.ckpt_orig_global_shape
        if saved == sh_ten.global_shape:
            return original(sh_ten, reformulation_metadata)
        wanted = sh_ten.without_data()
        counts = reformulation_metadata.ckpt_reform_global_shape[:-1]
        sizes = [whole // count for whole, count in zip(saved, counts)]
        lengths = (1,) * wanted.prepend_axis_num + wanted.local_shape
        numbers = [
            range(min(start // size, count - 1), min(-(-(start + length) // size), count))
            for start, length, size, count in zip(wanted.global_offset, lengths, sizes, counts)
        ]
        starts = [
            tuple(number * size for number, size in zip(each, sizes))
            for each in itertools.product(*numbers)
        ]
        pieces = {
            start: dataclasses.replace(
                wanted,
                local_shape=tuple(sizes[wanted.prepend_axis_num :]),
                global_shape=saved,
                global_offset=start,
                axis_fragmentations=counts,
                flattened_range=slice(0, math.prod(sizes)),
            )
            for start in starts
        }

        def merge(loaded: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor:
            whole = torch.zeros(
                lengths, dtype=wanted.dtype, device=next(iter(loaded.values())).device
            )
            for start, piece in loaded.items():
                mine, theirs = [], []
                for here, length, there, size in zip(wanted.global_offset, lengths, start, sizes):
                    begin, end = max(here, there), min(here + length, there + size)
                    mine.append(slice(begin - here, max(begin, end) - here))
                    theirs.append(slice(begin - there, max(begin, end) - there))
                whole[tuple(mine)] = piece.view(sizes)[tuple(theirs)]
            return whole.flatten()[wanted.flattened_range]

        return ShardedTensorFactory(
            wanted.key,
            wanted.data,
            lambda *_: pieces,
            merge,
            wanted.replica_id,
            wanted.flattened_range,
        )

    return reformulate


class ResultFile:
    """The results of one save, in a file without a name that the writing processes share.

    Unlike a pipe it takes results of any size before anyone reads them: Megatron reads them when
    the writer has ended.
    """

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._file = file or tempfile.TemporaryFile()

    def put(self, results: object) -> None:
        """Store the results."""
        self._file.write(pickle.dumps(results))
        self._file.flush()

    def get_nowait(self) -> Any:
        """Return the results, or raise `queue.Empty` as long as there are none."""
        self._file.seek(0)
        stored = self._file.read()
        if not stored:
            raise queue.Empty
        return pickle.loads(stored)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        """Let a process that was spawned for all saves open the same file."""
        return _open_shared, (reduction.DupFd(self._file.fileno()),)


def _open_shared(shared: Any) -> ResultFile:
    return ResultFile(os.fdopen(shared.detach(), "r+b"))
