"""The argument that torch's writer gained is filled in, and only where it is missing."""

import io

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import SerializationFormat

from mindspeed.compat.checkpoint_writer import wrap_write_item


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
