"""Attention of a new token to a KV cache on a GPU: the kernel against float64, also in a graph."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.decode_attention import decode_attention, reference, triton_impl
from tests.gpu.ops.test_attention_backend import error
from tests.unit.ops.decode_cases import draw, exact

pytestmark = pytest.mark.gpu
CASES = {
    # (rows, key heads, queries of each, head size, positions in the cache, first key, position)
    "SmolLM2, ragged": (64, 3, 3, 64, 320, tuple(range(64)), (287,)),
    "1.5B, a position a row": (64, 2, 6, 128, 320, (0,) * 64, tuple(range(200, 264))),
    "one query a key": (5, 12, 1, 64, 128, (0, 3, 0, 90, 1), (100,)),
    "head of 96": (3, 4, 4, 96, 200, (0, 70, 150), (199,)),
    "32 queries a key": (2, 1, 32, 128, 64, (0, 1), (40,)),
    "the first token": (7, 2, 2, 64, 512, (0,) * 7, (0,)),
    "few rows, split keys": (1, 2, 6, 128, 8192, (3,), (7001,)),
    "split, most splits empty": (1, 2, 6, 128, 8192, (3,), (5,)),
}
LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 2e-6}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64_row_by_row_and_fills_the_cache(name, dtype):
    arguments, options = draw(name, dtype, "cuda", CASES)
    rows, groups = arguments[0].shape[:2]
    splits = triton_impl._num_splits(rows * groups, len(arguments[3][0]), "cuda")
    assert (splits > 1) == ("split" in name)
    want, _ = exact(arguments, options)
    plain = [memory.clone() for memory in arguments[3]]
    reference.decode_attention(*arguments[:3], plain, arguments[4], **options)
    got = decode_attention(*arguments, **options)
    assert got.dtype == dtype and error(got, want) < LIMITS[dtype]
    for ours, theirs in zip(arguments[3], plain):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2, equal_nan=True)


def test_a_recorded_call_follows_the_position_on_the_device():
    arguments, options = draw("SmolLM2, ragged", torch.bfloat16, "cuda", CASES)
    *_, cache, position = arguments
    for memory in cache:
        memory.nan_to_num_(0.5)
    out = torch.empty_like(arguments[0])
    position.fill_(100)

    def step():
        out.copy_(decode_attention(*arguments, **options))
        position.add_(1)

    replay = device.current().record(step)
    for end in (101, 102, 103, 104):
        at = torch.full_like(position, end)
        copies = tuple(memory.clone() for memory in cache)
        want, _ = exact((*arguments[:3], copies, at), options)
        position.copy_(at)
        replay()
        assert error(out, want) < LIMITS[torch.bfloat16] and int(position) == end + 1
