"""Rows of a KV cache with one new token each, and their attention computed row by row."""

import torch
import torch.nn.functional as F

SCALE = 0.17
CASES = {
    # (rows, key heads, queries of each, head size, positions in the cache, first key, position)
    "grouped, ragged": (3, 2, 3, 16, 40, (0, 5, 33), (37,)),
    "a position for each row": (3, 1, 4, 16, 70, (0, 2, 0), (69, 2, 17)),
    "one query a key, head of no power of two": (2, 3, 1, 24, 20, (1, 0), (9,)),
    "a first token": (2, 2, 2, 8, 17, (0, 0), (0,)),
}


def draw(name, dtype, device="cpu", cases=None):
    """Return the arguments of a case: q, k, v as parts of one packed tensor, and the cache.

    Memory that a row must not read is not a number.
    """
    rows, groups, queries, size, capacity, first, position = (cases or CASES)[name]
    generator = torch.Generator().manual_seed(len(name))

    def random(*shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(device=device, dtype=dtype)

    packed = random(rows, groups, queries + 2, size)
    cache = (random(capacity, rows, groups, size), random(capacity, rows, groups, size))
    first, position = (torch.tensor(x, device=device) for x in (first, position))
    for row, (begin, end) in enumerate(zip(first, position.expand(rows))):
        for memory in cache:
            memory[:begin, row] = memory[end:, row] = torch.nan
    angles = random(capacity, size // 2).double() * 3
    angles = torch.cat([angles, angles], -1)
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)
    options = {"scale": SCALE, "first": first, "rotary": rotary}
    return (packed[:, :, :-2], packed[:, :, -2], packed[:, :, -1], cache, position), options


def exact(arguments, options):
    """Return the attention in float64, row by row, and the new keys and values."""
    q, k, v, cache, position = arguments
    out, new = [], []
    for row, end in enumerate(position.expand(len(q)).tolist()):
        cos, sin = (table[end].double() for table in options["rotary"])
        query, key = (_rotate(x[row].double(), cos, sin).to(x.dtype) for x in (q, k))
        begin = int(options["first"][row])
        keys, values = (
            torch.cat([memory[begin:end, row], one[None]]).double()
            for memory, one in zip(cache, (key, v[row]))
        )
        whole = F.scaled_dot_product_attention(
            query.double(), keys.transpose(0, 1), values.transpose(0, 1), scale=options["scale"]
        )
        out.append(whole)
        new.append((key, v[row]))
    return torch.stack(out), new


def _rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
