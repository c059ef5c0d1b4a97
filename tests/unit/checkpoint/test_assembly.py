"""Tensors assembled from shards: every value at its index, or an error."""

import pytest
import torch

from mindspeed.checkpoint.assembly import FullTensor, SliceCopy, StoredTensor
from mindspeed.config import ConfigError

VALUES = torch.arange(24.0).view(6, 4)


def sharded(*rows):
    """Return a weight whose shards are ranges of rows."""
    found = FullTensor()
    for first, last in rows:
        found.add(((first, last), (0, 4)), VALUES[first:last])
    return found


def stored(first, last, is_padded=False):
    copy = SliceCopy("w", ((first, last), (0, 4)), ((0, last - first), (0, 4)), is_padded=is_padded)
    return StoredTensor("x.weight", (last - first, 4), (copy,))


def filled(tensor, weight):
    target = torch.full(tensor.shape, torch.nan)
    tensor.fill(target, {"w": weight})
    return target


@pytest.mark.parametrize("rows", [[(0, 6)], [(0, 2), (2, 3), (3, 6)], [(4, 6), (0, 4), (0, 4)]])
def test_shards_fill_a_slice(rows):
    assert torch.equal(filled(stored(1, 5), sharded(*rows)), VALUES[1:5])


@pytest.mark.parametrize("rows", [[(0, 4)], [(0, 2), (3, 6)], [(2, 6)]])
def test_values_in_no_shard_are_an_error(rows):
    with pytest.raises(ConfigError, match="values for x.weight are in no source file"):
        filled(stored(1, 5), sharded(*rows))


def test_a_missing_weight_is_an_error():
    with pytest.raises(ConfigError, match="x.weight needs the weight w"):
        stored(0, 2).pieces({})


def test_padding_repeats_the_last_row():
    found = filled(stored(4, 8, is_padded=True), sharded((0, 3), (3, 6)))
    assert torch.equal(found, torch.cat([VALUES[4:], VALUES[5:].expand(2, 4)]))


def test_a_transposed_slice():
    copy = SliceCopy("w", ((1, 3), (0, 4)), ((1, 2), (0, 4), (0, 2)), is_transposed=True)
    both = StoredTensor("x", (8, 2), (copy,), view=(2, 4, 2))
    target = torch.zeros(8, 2)
    both.fill(target, {"w": sharded((0, 6))})
    assert torch.equal(target[4:], VALUES[1:3].t()) and not target[:4].any()
    assert torch.equal(copy.to_full(target.view(2, 4, 2)), VALUES[1:3])


def test_dtypes():
    half = FullTensor()
    half.add(((0, 6), (0, 4)), VALUES.bfloat16())
    plain = stored(0, 6)
    assert plain.dtype({"w": half}, None) == torch.bfloat16
    assert plain.dtype({"w": half}, torch.float16) == torch.float16
    kept = StoredTensor("b", (6, 4), plain.copies, is_float32=True)
    assert kept.dtype({"w": sharded((0, 6))}, torch.float16) == torch.float32
