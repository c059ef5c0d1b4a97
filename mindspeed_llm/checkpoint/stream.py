"""The bytes of a tensor that is put together from pieces, in order and a few at a time."""

from collections.abc import Iterator

import torch

from mindspeed_llm.checkpoint.boxes import Box
from mindspeed_llm.checkpoint.mapped_file import aligned

BLOCK = 8 << 20
"""Bytes that are put together at a time."""

Piece = tuple[Box, torch.Tensor]


def new_buffer() -> torch.Tensor:
    """Return the memory that `blocks` works in; one for each thread."""
    return torch.empty(BLOCK, dtype=torch.uint8)


def blocks(
    shape: tuple[int, ...], pieces: list[Piece], dtype: torch.dtype, buffer: torch.Tensor
) -> Iterator[memoryview]:
    """Yield the bytes; each block is to be used up before the next is taken.

    What lies in memory as it will in the file is not copied.
    """
    if len(shape) > 2:
        for number in range(shape[0]):
            inner = [
                (box[1:], values[number - box[0][0]])
                for box, values in pieces
                if box[0][0] <= number < box[0][1]
            ]
            yield from blocks(shape[1:], inner, dtype, buffer)
        return
    matrix = (shape[0], 1) if len(shape) == 1 else (shape[0], shape[1])
    if len(shape) == 1:
        pieces = [((box[0], (0, 1)), values.unsqueeze(1)) for box, values in pieces]
    borders = sorted({row for box, _ in pieces for row in box[0]})
    for start, stop in zip(borders, borders[1:]):
        active = [piece for piece in pieces if piece[0][0][0] <= start < piece[0][0][1]]
        yield from _rows(matrix[1], active, (start, stop), dtype, buffer)


def _rows(
    width: int,
    pieces: list[Piece],
    rows: tuple[int, int],
    dtype: torch.dtype,
    buffer: torch.Tensor,
) -> Iterator[memoryview]:
    """Yield rows to which every piece contributes."""
    start, stop = rows
    cut = [(box[1], values[start - box[0][0] : stop - box[0][0]]) for box, values in pieces]
    is_ready = len(cut) == 1 and cut[0][1].dtype == dtype and cut[0][1].is_contiguous()
    step = max(1, min(BLOCK, buffer.numel()) // (width * dtype.itemsize))
    if buffer.numel() < width * dtype.itemsize:
        buffer = torch.empty(width * dtype.itemsize, dtype=torch.uint8)
    for first in range(0, stop - start, step):
        last = min(first + step, stop - start)
        if is_ready:
            yield _bytes(cut[0][1][first:last])
            continue
        block = buffer[: (last - first) * width * dtype.itemsize].view(dtype)
        block = block.view(last - first, width)
        for (left, right), values in cut:
            block[:, left:right].copy_(aligned(values[first:last]))
        yield _bytes(block)


def _bytes(values: torch.Tensor) -> memoryview:
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
