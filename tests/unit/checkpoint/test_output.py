"""Pieces of any slicing, order, dtype and orientation become the bytes of the full tensor."""

import random

import pytest
import torch

from mindspeed.checkpoint import output
from mindspeed.checkpoint.tensor_slice import to_index


def tiled(shape, random_):
    """Partition a tensor into slices, at random."""
    regions = [tuple((0, size) for size in shape)]
    for _ in range(random_.randrange(12)):
        region = regions.pop(random_.randrange(len(regions)))
        axis = random_.randrange(len(shape))
        start, stop = region[axis]
        middle = random_.randint(start, stop)
        for part in ((start, middle), (middle, stop)):
            if part[0] < part[1]:
                regions.append((*region[:axis], part, *region[axis + 1 :]))
    random_.shuffle(regions)
    return regions


def unaligned(values):
    """Return the same values as they would lie in a file with a header of odd length."""
    memory = bytearray(b"x" + values.numpy().tobytes("A"))
    flat = torch.frombuffer(memory, dtype=values.dtype, offset=1)
    return flat.as_strided(values.shape, values.stride())


@pytest.mark.parametrize("seed", range(40))
def test_bytes(monkeypatch, seed):
    random_ = random.Random(seed)
    monkeypatch.setattr(output, "BLOCK", random_.choice([4, 64, 1 << 20]))
    shape = tuple(random_.randint(1, 9) for _ in range(random_.randint(1, 3)))
    full = torch.randn(shape)
    source = full if seed % 2 else full.t().contiguous().t() if len(shape) == 2 else full
    if seed % 3 == 0:
        source = unaligned(source)
    pieces = [(region, source[to_index(region)]) for region in tiled(shape, random_)]
    dtype = random_.choice([torch.float32, torch.bfloat16])
    found = b"".join(bytes(b) for b in output.blocks(shape, pieces, dtype, output.new_buffer()))
    expected = full.to(dtype).contiguous().view(-1).view(torch.uint8)
    assert found == bytes(expected.numpy())
