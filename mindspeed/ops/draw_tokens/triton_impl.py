"""draw_tokens in Triton: the logits are read once, and no probabilities are written.

The first launch adds up spans of 128 tokens, 32 spans a program, each relative to the largest logit
of the program. In the second a program has a row: it brings the sums to one scale, adds them up,
and reads the span of the point again.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mindspeed.ops.draw_tokens import reference
from mindspeed.ops.draw_tokens.kernels import pick, sum_spans
from mindspeed.ops.draw_tokens.reference import SPAN
from mindspeed.ops.launch import launch

SPANS = 32  # of a program: 4096 tokens
MAX_VOCABULARY = 1 << 20  # the sums of a row are one tile


def draw_tokens(logits: Tensor, points: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return a token of each row and its log-probability, in float32."""
    rows, vocab_size = logits.shape
    if logits.dtype == torch.float64 or vocab_size > MAX_VOCABULARY:
        return reference.draw_tokens(logits, points, temperature)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_spans, num_blocks = triton.cdiv(vocab_size, SPAN), triton.cdiv(vocab_size, SPAN * SPANS)
    sums = logits.new_empty(rows, num_spans, dtype=torch.float32)
    tops = logits.new_empty(rows, num_blocks, dtype=torch.float32)
    best = logits.new_empty(rows, num_blocks, dtype=torch.int32)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    log_probs = logits.new_empty(rows, dtype=torch.float32)
    launch(
        sum_spans,
        (rows, num_blocks),
        *(logits, logits.stride(0), sums, tops, best, vocab_size, num_spans, float(temperature)),
        SPAN=SPAN,
        SPANS=SPANS,
        num_warps=4,
    )
    launch(
        pick,
        (rows,),
        *(logits, logits.stride(0), sums, tops, best, points.float().contiguous()),
        *(tokens, log_probs, vocab_size, num_spans, num_blocks, float(temperature)),
        SPAN=SPAN,
        SPANS=SPANS,
        BLOCK_S=triton.next_power_of_2(num_spans),
        BLOCK_B=triton.next_power_of_2(num_blocks),
        num_warps=4,
    )
    return tokens, log_probs
