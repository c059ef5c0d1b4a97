"""Triton kernels of draw_tokens; triton_impl describes what a program does."""

import triton
import triton.language as tl


@triton.jit
def _load_logits(ptr, offs, size, temperature):
    x = tl.load(ptr + offs, mask=offs < size, other=float("-inf")).to(tl.float32)
    return x / temperature


@triton.jit
def _largest_below(x):
    """Return the largest float32 below a positive number, and 0 for 0."""
    bits = tl.maximum(x.to(tl.int32, bitcast=True) - 1, 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _share_of(ends, widths, offs, point):
    """Return the share that a point falls into, of those that are not empty; -1 if all are.

    Running sums are rounded, each by itself: they may grow where nothing is added.
    """
    index = tl.sum((ends <= point).to(tl.int32), axis=0)
    is_share = widths > 0
    before = tl.max(tl.where(is_share & (offs <= index), offs, -1), axis=0)
    first = tl.min(tl.where(is_share, offs, 1 << 30), axis=0)
    return tl.where(before >= 0, before, tl.where(first < (1 << 30), first, -1))


@triton.jit
def sum_spans(
    logits_ptr,
    stride_m,
    sums_ptr,
    tops_ptr,
    best_ptr,
    vocab_size,
    num_spans,
    temperature,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Add up the spans of a block of a row, relative to its largest logit, and find that."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = block * (SPANS * SPAN) + tl.arange(0, SPANS * SPAN)
    x = _load_logits(logits_ptr + row * stride_m, offs, vocab_size, temperature)
    top, best = tl.max(x, axis=0, return_indices=True)
    finite = tl.where(top == float("-inf"), 0.0, top)  # of a block without a token to draw
    sums = tl.sum(tl.reshape(tl.exp(x - finite), (SPANS, SPAN)), axis=1)
    offs_s = block * SPANS + tl.arange(0, SPANS)
    tl.store(sums_ptr + row * num_spans + offs_s, sums, mask=offs_s < num_spans)
    at = row * tl.num_programs(1) + block
    tl.store(tops_ptr + at, top)
    tl.store(best_ptr + at, block * (SPANS * SPAN) + best)


@triton.jit
def pick(
    logits_ptr,
    stride_m,
    sums_ptr,
    tops_ptr,
    best_ptr,
    points_ptr,
    tokens_ptr,
    log_probs_ptr,
    vocab_size,
    num_spans,
    num_blocks,
    temperature,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Find the span of a row that its point falls into, and the token in it."""
    row = tl.program_id(0).to(tl.int64)
    offs_b, offs_s = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_S)
    tops_ptr += row * num_blocks
    tops = tl.load(tops_ptr + offs_b, mask=offs_b < num_blocks, other=float("-inf"))
    top, best_block = tl.max(tops, axis=0, return_indices=True)
    mask_s = offs_s < num_spans
    sums = tl.load(sums_ptr + row * num_spans + offs_s, mask=mask_s, other=0.0)
    tops_s = tl.load(tops_ptr + offs_s // SPANS, mask=mask_s, other=float("-inf"))
    sums *= tl.exp(tops_s - top)
    ends = tl.cumsum(sums, axis=0)
    total = tl.max(ends, axis=0)
    point = tl.minimum(tl.load(points_ptr + row) * total, _largest_below(total))
    index = tl.maximum(_share_of(ends, sums, offs_s, point), 0)
    begin = tl.max(tl.where(offs_s < index, ends, 0.0), axis=0)

    offs = tl.arange(0, SPAN)
    x = _load_logits(logits_ptr + row * stride_m, index * SPAN + offs, vocab_size, temperature)
    probs = tl.exp(x - top)
    ends = tl.cumsum(probs, axis=0)
    point = tl.minimum(point - begin, _largest_below(tl.max(ends, axis=0)))
    inner = _share_of(ends, probs, offs, point)
    # Every token of a span may vanish beside the best one of the row, which is taken then.
    is_drawn = inner >= 0
    logit = tl.sum(tl.where(offs == inner, x, 0.0), axis=0)
    # NaN loses every comparison, so that its best token may be one of the padding.
    best = tl.load(best_ptr + row * num_blocks + tl.minimum(best_block, num_blocks - 1))
    best = tl.minimum(tl.maximum(best, 0), vocab_size - 1)
    token = tl.where(is_drawn, index * SPAN + inner, best)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    log_prob = tl.where(is_drawn, logit, top) - top - tl.log(total)
    tl.store(log_probs_ptr + row, log_prob)
