"""The Triton kernels of cross entropy, over the part of the vocabulary that a rank holds."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)  # finite: the difference of two infinities is not a number


@triton.jit
def cross_entropy_forward(
    logits,
    targets,
    statistics,
    losses,
    lses,
    rows,
    width,
    start,
    smoothing,
    even,
    ignore_index,
    IS_FIRST: tl.constexpr,
    FINISHES: tl.constexpr,
    SMOOTHS: tl.constexpr,
    LANES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Reduce a row of logits, going on from `statistics` or not, to its loss or to those."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    counts = target != ignore_index
    line = logits + row * width
    cells = tl.arange(0, LANES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    tops = tl.full((LANES,), LOWEST, tl.float32)
    norms = tl.zeros((LANES,), tl.float32)
    totals = tl.zeros((LANES,), tl.float32)
    # A token that does not count is not read.
    for begin in range(0, tl.where(counts, width, 0), LANES * WIDE):
        columns = begin + cells
        x = tl.load(line + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(tops, tl.max(x, axis=1))
        norms = norms * tl.exp(tops - higher) + tl.sum(tl.exp(x - higher[:, None]), axis=1)
        tops = higher
        if SMOOTHS:
            totals += tl.sum(tl.where(columns < width, x, 0.0), axis=1)
    top = tl.max(tops, axis=0)
    norm = tl.where(counts, tl.sum(norms * tl.exp(tops - top), axis=0), 1.0)
    total = tl.sum(totals, axis=0)
    column = target - start
    is_here = (column >= 0) & (column < width)
    picked = tl.load(line + column, mask=is_here, other=0.0).to(tl.float32)

    if not IS_FIRST:
        old_top = tl.load(statistics + row)
        both = tl.maximum(top, old_top)
        norm = norm * tl.exp(top - both)
        norm += tl.load(statistics + rows + row) * tl.exp(old_top - both)
        picked += tl.load(statistics + 2 * rows + row)
        total += tl.load(statistics + 3 * rows + row)
        top = both
    if FINISHES:
        log_norm = tl.log(norm)
        loss = log_norm + (top - picked)
        if SMOOTHS:
            loss += smoothing * picked - even * total
        tl.store(losses + row, tl.where(counts, loss, 0.0))
        tl.store(lses + row, log_norm + top)
    else:
        tl.store(statistics + row, top)
        tl.store(statistics + rows + row, norm)
        tl.store(statistics + 2 * rows + row, picked)
        tl.store(statistics + 3 * rows + row, total)


@triton.jit
def cross_entropy_backward(
    logits,
    targets,
    lses,
    grad_losses,
    grad,
    width,
    blocks,
    start,
    confidence,
    even,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """Write a block of a row of gradients; it may lie where the logits do."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row).to(tl.int64)
    counts = target != ignore_index
    mask = columns < width
    read = columns < tl.where(counts, width, 0)
    place = row * width + columns
    x = tl.load(logits + place, mask=read, other=-float("inf")).to(tl.float32)
    slope = tl.exp(x - tl.load(lses + row)) - even
    slope = tl.where(columns == target - start, slope - confidence, slope)
    slope *= tl.load(grad_losses + row)
    tl.store(grad + place, tl.where(counts, slope, 0.0).to(grad.dtype.element_ty), mask=mask)
