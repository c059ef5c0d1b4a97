"""Tensors put together from parts: all numbers, each in its place, or an error."""

import pytest
import torch

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.assembly import Stored, Tile, Whole

VALUES = torch.arange(24.0).view(6, 4)


def whole(*rows):
    """A weight whose parts are stretches of rows."""
    found = Whole()
    for first, last in rows:
        found.add(((first, last), (0, 4)), VALUES[first:last])
    return found


def stored(first, last, is_padded=False):
    tile = Tile("w", ((first, last), (0, 4)), ((0, last - first), (0, 4)), is_padded=is_padded)
    return Stored("x.weight", (last - first, 4), (tile,))


def filled(tensor, weight):
    target = torch.full(tensor.shape, torch.nan)
    tensor.fill(target, {"w": weight})
    return target


@pytest.mark.parametrize("rows", [[(0, 6)], [(0, 2), (2, 3), (3, 6)], [(4, 6), (0, 4), (0, 4)]])
def test_parts_make_a_tile(rows):
    assert torch.equal(filled(stored(1, 5), whole(*rows)), VALUES[1:5])


@pytest.mark.parametrize("rows", [[(0, 4)], [(0, 2), (3, 6)], [(2, 6)]])
def test_numbers_that_no_part_has_are_an_error(rows):
    with pytest.raises(ConfigError, match="numbers for x.weight are in no source file"):
        filled(stored(1, 5), whole(*rows))


def test_a_weight_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match="x.weight needs the weight w"):
        stored(0, 2).pieces({})


def test_padding_repeats_the_last_row():
    found = filled(stored(4, 8, is_padded=True), whole((0, 3), (3, 6)))
    assert torch.equal(found, torch.cat([VALUES[4:], VALUES[5:].expand(2, 4)]))


def test_a_transposed_tile():
    tile = Tile("w", ((1, 3), (0, 4)), ((1, 2), (0, 4), (0, 2)), is_transposed=True)
    both = Stored("x", (8, 2), (tile,), view=(2, 4, 2))
    target = torch.zeros(8, 2)
    both.fill(target, {"w": whole((0, 6))})
    assert torch.equal(target[4:], VALUES[1:3].t()) and not target[:4].any()
    assert torch.equal(tile.to_whole(target.view(2, 4, 2)), VALUES[1:3])


def test_types():
    half = Whole()
    half.add(((0, 6), (0, 4)), VALUES.bfloat16())
    plain = stored(0, 6)
    assert plain.dtype({"w": half}, None) == torch.bfloat16
    assert plain.dtype({"w": half}, torch.float16) == torch.float16
    kept = Stored("b", (6, 4), plain.tiles, is_float32=True)
    assert kept.dtype({"w": whole((0, 6))}, torch.float16) == torch.float32
