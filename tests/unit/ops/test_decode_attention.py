"""Attention of a new token to a KV cache against float64, row by row."""

import pytest
import torch

from mindspeed.ops.decode_attention import decode_attention, triton_impl
from tests.unit.ops.decode_cases import CASES, draw, exact

IMPLS = pytest.mark.parametrize("attend", [decode_attention, triton_impl.decode_attention])
# Not bfloat16, whose bits the interpreter multiplies as integers in tl.dot.
LIMITS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 3e-3}


@IMPLS
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64_row_by_row_and_fills_the_cache(attend, dtype, name):
    arguments, options = draw(name, dtype)
    want, new = exact(arguments, options)
    before = [memory.clone() for memory in arguments[3]]
    got = attend(*arguments, **options)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=LIMITS[dtype], atol=LIMITS[dtype])
    for memory, old, of_rows in zip(arguments[3], before, zip(*new)):
        for row, (one, end) in enumerate(zip(of_rows, arguments[4].expand(len(want)).tolist())):
            torch.testing.assert_close(memory[end, row], one)
            old[end, row] = memory[end, row]
        torch.testing.assert_close(memory, old, rtol=0, atol=0, equal_nan=True)


@IMPLS
def test_without_rotation_and_from_the_first_key_on(attend):
    arguments, options = draw("grouped, ragged", torch.float32)
    cache = tuple(torch.nan_to_num(memory, 0.3) for memory in arguments[3])
    arguments = (*arguments[:3], cache, arguments[4])
    tables = torch.ones_like(options["rotary"][0]), torch.zeros_like(options["rotary"][1])
    start = torch.zeros_like(options["first"])
    want, _ = exact(arguments, options | {"rotary": tables, "first": start})
    got = attend(*arguments, scale=options["scale"])
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_keys_split_among_programs_make_the_whole(monkeypatch, name):
    monkeypatch.setattr(triton_impl, "MIN_SPLIT", 8)
    monkeypatch.setattr(triton_impl, "TILE_BYTES", 1024)
    monkeypatch.setattr(triton_impl, "_constants", triton_impl._constants.__wrapped__)
    monkeypatch.setattr(triton_impl, "multiprocessors", lambda: 16)
    arguments, options = draw(name, torch.float32)
    rows, groups = arguments[0].shape[:2]
    splits = triton_impl._num_splits(rows * groups, len(arguments[3][0]), "cuda")
    assert splits > 1
    monkeypatch.setattr(triton_impl, "_num_splits", lambda *_: splits)
    want, _ = exact(arguments, options)
    got = triton_impl.decode_attention(*arguments, **options)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("programs", "capacity", "splits"),
    [(192, 320, 1), (128, 320, 1), (1, 320, 1), (2, 32768, 64), (64, 32768, 4), (300, 32768, 1)],
)
def test_splits_fill_the_device_and_keep_their_keys(monkeypatch, programs, capacity, splits):
    monkeypatch.setattr(triton_impl, "multiprocessors", lambda: 132)
    assert triton_impl._num_splits(programs, capacity, "cuda") == splits


def test_tensors_that_do_not_match_are_named():
    (q, k, v, cache, position), options = draw("grouped, ragged", torch.float32)
    with pytest.raises(ValueError, match=r"use \(B, G, N, H\)"):
        decode_attention(q[:, :1], k, v, cache, position, **options)
    with pytest.raises(ValueError, match=r"use \(T, 3, 2, 16\)"):
        decode_attention(q, k, v, (cache[0], cache[1][:, :2]), position, **options)
    with pytest.raises(ValueError, match=r"position has to be \(1,\) or \(3,\)"):
        decode_attention(q, k, v, cache, position.expand(2), **options)
    with pytest.raises(ValueError, match=r"use \(40, 16\)"):
        short = tuple(table[:7] for table in options["rotary"])
        decode_attention(q, k, v, cache, position, **options | {"rotary": short})
    with pytest.raises(ValueError, match="has no gradient"):
        decode_attention(q.requires_grad_(), k, v, cache, position, **options)
