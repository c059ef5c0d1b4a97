"""One step of Adam or AdamW in Triton: all tensors of a list in one launch, each byte moved once.

A table holds the address of every tensor. Programs take pieces of equal size, whatever the sizes of
the tensors, so hundreds of small ones cost no more than one of their total size.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.adamw import reference
from mindspeed.ops.adamw.reference import AdamHyper, Tensors

# A program walks PIECE elements, BLOCK at a time: four float32 a thread, a 16-byte load of each
# tensor. With more a thread a 16-bit copy would want another layout, and pay for the exchange.
PIECE, BLOCK, WARPS = 8192, 1024, 8
LISTS = 6
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def adamw(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    hyper: AdamHyper,
    *,
    averages: Tensors = (),
    copies: Tensors = (),
) -> None:
    """Update params, exp_avgs and exp_avg_sqs in place, and averages and copies where given."""
    absent = [None] * len(params)
    rows = zip(params, grads, exp_avgs, exp_avg_sqs, averages or absent, copies or absent)
    kinds: dict[_Kind, list[_Row]] = defaultdict(list)
    for row in rows:
        if _is_served(row):
            kinds[_kind(row)].append(row)
        else:
            _run_plain(row, hyper)
    for kind, members in kinds.items():
        _launch(members, hyper, kind)


_Row = tuple[Tensor | None, ...]
_Kind = tuple[torch.dtype, torch.dtype, bool]


def _kind(row: _Row) -> _Kind:
    """Return what the kernel is compiled for: types of gradient and copy, 16-byte alignment."""
    copy = row[0] if row[5] is None else row[5]
    is_aligned = all(tensor.data_ptr() % 16 == 0 for tensor in row if tensor is not None)
    return row[1].dtype, copy.dtype, is_aligned


def _is_served(row: _Row) -> bool:
    tensors = [tensor for tensor in row if tensor is not None]
    is_float32 = all(tensor.dtype == torch.float32 for tensor in (row[0], *row[2:4]))
    known = all(tensor.dtype in TYPES for tensor in tensors)
    return is_float32 and known and all(tensor.is_contiguous() for tensor in tensors)


def _run_plain(row: _Row, hyper: AdamHyper) -> None:
    lists = [[] if tensor is None else [tensor] for tensor in row]
    reference.adamw(*lists[:4], hyper, averages=lists[4], copies=lists[5])


def _launch(rows: list[_Row], hyper: AdamHyper, kind: _Kind) -> None:
    grad_type, copy_type, is_aligned = kind
    addresses = tuple(0 if t is None else t.data_ptr() for row in rows for t in row)
    sizes = tuple(row[0].numel() for row in rows)
    table, owners, starts = _table(addresses, sizes, rows[0][0].device)
    if not len(owners):
        return
    (beta1, beta2), (correction1, correction2) = hyper.betas, hyper.corrections
    decay = hyper.weight_decay
    _step[(len(owners),)](
        table,
        owners,
        starts,
        hyper.lr / correction1,
        1 / math.sqrt(correction2),
        hyper.eps,
        1 - beta1,
        beta2,
        1 - beta2,
        1 - hyper.lr * decay if hyper.decoupled else decay,
        1 - hyper.ema_decay,
        DECOUPLED=hyper.decoupled,
        AVERAGES=rows[0][4] is not None,
        COPIES=rows[0][5] is not None,
        ALIGNED=is_aligned,
        GRAD=TYPES[grad_type],
        COPY=TYPES[copy_type],
        PIECE=PIECE,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@functools.lru_cache(maxsize=16)
def _table(
    addresses: tuple[int, ...], sizes: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the programs look up: per tensor its addresses and size, its first program.

    Optimizers step on the same tensors again and again, so the table is made once.
    """
    lines = [(*addresses[i * LISTS : (i + 1) * LISTS], size) for i, size in enumerate(sizes)]
    pieces = [triton.cdiv(size, PIECE) for size in sizes]
    owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(pieces))
    starts = torch.tensor(_running_sum(pieces), dtype=torch.int32)
    table = torch.tensor(lines, dtype=torch.int64)
    return table.to(device), owners.to(device), starts.to(device)


def _running_sum(counts: Sequence[int]) -> list[int]:
    sums = [0]
    for count in counts[:-1]:
        sums.append(sums[-1] + count)
    return sums


@triton.jit
def _address(line, index: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(line + index).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _update(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    averages,
    copies,
    mask,
    numbers,
    DECOUPLED: tl.constexpr,
    AVERAGES: tl.constexpr,
    COPIES: tl.constexpr,
):
    rate, inverse_root, eps, toward_grad, beta2, toward_square, decay, toward_new = numbers
    param = tl.load(params, mask=mask)
    grad = tl.load(grads, mask=mask).to(tl.float32)
    exp_avg = tl.load(exp_avgs, mask=mask)
    exp_avg_sq = tl.load(exp_avg_sqs, mask=mask)
    if DECOUPLED:
        param *= decay
    else:
        grad += decay * param
    exp_avg += toward_grad * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + toward_square * grad * grad
    param -= rate * exp_avg / (tl.sqrt_rn(exp_avg_sq) * inverse_root + eps)
    tl.store(params, param, mask=mask)
    tl.store(exp_avgs, exp_avg, mask=mask)
    tl.store(exp_avg_sqs, exp_avg_sq, mask=mask)
    if AVERAGES:
        average = tl.load(averages, mask=mask)
        tl.store(averages, average + toward_new * (param - average), mask=mask)
    if COPIES:
        tl.store(copies, param.to(copies.dtype.element_ty), mask=mask)


@triton.jit
def _step(
    table,
    owners,
    starts,
    rate,
    inverse_root,
    eps,
    toward_grad,
    beta2,
    toward_square,
    decay,
    toward_new,
    DECOUPLED: tl.constexpr,
    AVERAGES: tl.constexpr,
    COPIES: tl.constexpr,
    ALIGNED: tl.constexpr,
    GRAD: tl.constexpr,
    COPY: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    owner = tl.load(owners + tl.program_id(0))
    first = tl.load(starts + owner)
    line = table + owner.to(tl.int64) * 7
    params = _address(line, 0, tl.float32, ALIGNED)
    grads = _address(line, 1, GRAD, ALIGNED)
    exp_avgs = _address(line, 2, tl.float32, ALIGNED)
    exp_avg_sqs = _address(line, 3, tl.float32, ALIGNED)
    averages = _address(line, 4, tl.float32, ALIGNED)
    copies = _address(line, 5, COPY, ALIGNED)
    size = tl.load(line + 6)
    numbers = (rate, inverse_root, eps, toward_grad, beta2, toward_square, decay, toward_new)
    begin = (tl.program_id(0) - first).to(tl.int64) * PIECE
    if begin + PIECE <= size:  # a mask would make the loads narrow, so only the last piece has one
        for offset in range(0, PIECE, BLOCK):
            at = begin + offset + tl.arange(0, BLOCK)
            _update(
                params + at,
                grads + at,
                exp_avgs + at,
                exp_avg_sqs + at,
                averages + at,
                copies + at,
                None,
                numbers,
                DECOUPLED,
                AVERAGES,
                COPIES,
            )
    else:
        for offset in range(0, PIECE, BLOCK):
            at = begin + offset + tl.arange(0, BLOCK)
            _update(
                params + at,
                grads + at,
                exp_avgs + at,
                exp_avg_sqs + at,
                averages + at,
                copies + at,
                at < size,
                numbers,
                DECOUPLED,
                AVERAGES,
                COPIES,
            )
