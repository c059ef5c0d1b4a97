"""Pieces of any cut, order, type and orientation become the bytes of the whole tensor."""

import random

import pytest
import torch

from mindspeed_llm.checkpoint import stream
from mindspeed_llm.checkpoint.boxes import slices


def tiled(shape, random_):
    """Cut a box into boxes, at random."""
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(random_.randrange(12)):
        box = boxes.pop(random_.randrange(len(boxes)))
        axis = random_.randrange(len(shape))
        start, stop = box[axis]
        middle = random_.randint(start, stop)
        for part in ((start, middle), (middle, stop)):
            if part[0] < part[1]:
                boxes.append((*box[:axis], part, *box[axis + 1 :]))
    random_.shuffle(boxes)
    return boxes


def at_an_odd_address(values):
    """Return the same numbers as they would lie in a file with a header of odd length."""
    memory = bytearray(b"x" + values.numpy().tobytes("A"))
    numbers = torch.frombuffer(memory, dtype=values.dtype, offset=1)
    return numbers.as_strided(values.shape, values.stride())


@pytest.mark.parametrize("seed", range(40))
def test_bytes(monkeypatch, seed):
    random_ = random.Random(seed)
    monkeypatch.setattr(stream, "BLOCK", random_.choice([4, 64, 1 << 20]))
    shape = tuple(random_.randint(1, 9) for _ in range(random_.randint(1, 3)))
    whole = torch.randn(shape)
    source = whole if seed % 2 else whole.t().contiguous().t() if len(shape) == 2 else whole
    if seed % 3 == 0:
        source = at_an_odd_address(source)
    pieces = [(box, source[slices(box)]) for box in tiled(shape, random_)]
    dtype = random_.choice([torch.float32, torch.bfloat16])
    found = b"".join(bytes(b) for b in stream.blocks(shape, pieces, dtype, stream.new_buffer()))
    expected = whole.to(dtype).contiguous().view(-1).view(torch.uint8)
    assert found == bytes(expected.numpy())
