"""What newer torch wants of the writer is filled in, and what it drops is kept."""

import dataclasses
import io
import multiprocessing
import pickle
import queue

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata

from mindspeed.compat.checkpoint import (
    ResultFile,
    wrap_finish,
    wrap_reformulate,
    wrap_write_item,
)


def write(transforms, stream, data, write_item, storage_key, serialization_format):
    return serialization_format


@pytest.mark.parametrize(
    "more, written",
    [
        ((), SerializationFormat.TORCH_SAVE),
        ((SerializationFormat.SAFETENSORS,), SerializationFormat.SAFETENSORS),
    ],
    ids=["megatron-core 0.12", "newer"],
)
def test_format(more, written):
    assert wrap_write_item(write)(None, None, None, None, "key", *more) is written
    named = dict(zip(["serialization_format"], more))
    assert wrap_write_item(write)(None, None, None, None, storage_key="key", **named) is written


def test_older_torch_needs_nothing():
    def old(stream, data, write_item, storage_key):
        return stream

    assert wrap_write_item(old) is old


def test_bytes_are_those_of_torch():
    """Run torch's own writer both ways on one tensor."""
    item = torch.distributed.checkpoint.planner_helpers._create_write_items("w", torch.arange(4))[0]
    transforms = filesystem._StorageWriterTransforms()
    files = [io.BytesIO(), io.BytesIO()]
    filesystem._write_item(
        transforms, files[0], torch.arange(4), item, "key", SerializationFormat.TORCH_SAVE
    )
    wrap_write_item(filesystem._write_item)(transforms, files[1], torch.arange(4), item, "key")
    assert files[0].getvalue() == files[1].getvalue() != b""


def finish_a_copy(writer, metadata, results):
    copy = dataclasses.replace(metadata, planner_data="seen")
    copy.storage_data = results
    return pickle.dumps(copy)


def finish_in_place(writer, metadata, results):
    metadata.planner_data, metadata.storage_data = "seen", results
    return pickle.dumps(metadata)


@pytest.mark.parametrize("finish", [finish_a_copy, finish_in_place])
def test_what_megatron_adds_to_the_metadata_is_written(finish):
    metadata = Metadata({})
    metadata.mcore_data = {"weight": {"shape": (2, 3)}}
    read = pickle.loads(wrap_finish(finish)(None, metadata, "results"))
    assert type(read) is type(metadata) is Metadata
    assert read.mcore_data == {"weight": {"shape": (2, 3)}}
    assert (read.planner_data, read.storage_data) == ("seen", "results")


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_results_of_any_size_reach_the_rank_after_their_writer_has_ended(start):
    results = ResultFile()
    with pytest.raises(queue.Empty):
        results.get_nowait()
    many = {0: list(range(200_000))}  # more than a pipe holds: its writer would wait for a reader
    writer = multiprocessing.get_context(start).Process(target=results.put, args=(many,))
    writer.start()
    writer.join(300)
    assert writer.exitcode == 0 and results.get_nowait() == many


def part_of(whole, ranks, rank, flattened_range):
    """Return a rank's part of a vocabulary whose rows are those of `whole`."""
    from megatron.core.dist_checkpointing import ShardedTensor

    part = whole.chunk(ranks)[rank]
    return ShardedTensor.from_rank_offsets_flat(
        "words", part.flatten()[flattened_range], part.shape, (0, rank, ranks),
        flattened_range=flattened_range, allow_shape_mismatch=True,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_state_of_a_vocabulary_with_other_padding(ranks):
    """Each row is read where it is, and padding that was not saved is zero."""
    resharding = pytest.importorskip("megatron.core.dist_checkpointing.strategies.resharding")
    reformulate = wrap_reformulate(resharding.reformulate_single_nd_flattened_tensor)
    rows = torch.arange(1, 1 + 9 * 2).view(9, 2)
    wanted = torch.nn.functional.pad(rows, (0, 0, 0, -9 % ranks))
    for others in (1, 2, 3, 4, 8):
        saved = torch.nn.functional.pad(rows, (0, 0, 0, -9 % others))
        parts = [each.flatten() for each in saved.chunk(others)]
        metadata = resharding.TensorReformulationMetadata(
            tuple(saved.shape), (others, 1, parts[0].numel())
        )
        for rank, part in enumerate(wanted.chunk(ranks)):
            for places in (slice(0, part.numel()), slice(1, part.numel() - 1)):
                factory = reformulate(part_of(wanted, ranks, rank, places), metadata)
                built = factory.build()
                size = saved.shape[0] // others
                loaded = {key: parts[each.global_offset[0] // size] for key, each in built.items()}
                assert factory.merge_fn(loaded).equal(part.flatten()[places]), (others, rank)
