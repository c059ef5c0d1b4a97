"""One step of Adam or AdamW in Triton: all tensors of a list in one launch, each byte moved once.

A table holds the address of every tensor. Programs take pieces of equal size, whatever the sizes of
the tensors, so hundreds of small ones cost no more than one of their total size.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.adamw import reference
from mindspeed.ops.adamw.reference import AdamHyper, Tensors

# A program walks PIECE elements, BLOCK at a time: four float32 a thread, a 16-byte load of each
# tensor. With more a thread a 16-bit copy would want another layout, and pay for the exchange.
PIECE, BLOCK, WARPS = 8192, 1024, 8
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
    grad_scale: Tensor | None = None,
) -> None:
    """Update params, exp_avgs and exp_avg_sqs in place, and averages and copies where given."""
    lists = (params, grads, exp_avgs, exp_avg_sqs, averages, copies)
    if torch.compiler.is_compiling():  # it has no addresses, and fuses lists by itself
        reference.adamw(*lists[:4], hyper, averages=averages, copies=copies, grad_scale=grad_scale)
        return
    scale = None if grad_scale is None else grad_scale.float()
    if _is_uniform(lists):
        _run_uniform(lists, hyper, scale)
        return
    kinds: dict[object, list[int]] = defaultdict(list)
    for index, row in enumerate(zip(*filter(None, lists))):
        is_contiguous = all(map(Tensor.is_contiguous, row))
        kinds[(is_contiguous, *(tensor.dtype for tensor in row))].append(index)
    for members in kinds.values():
        part = tuple([tensors[i] for i in members] if tensors else () for tensors in lists)
        if _is_uniform(part):
            _run_uniform(part, hyper, scale)
        else:
            reference.adamw(
                *part[:4], hyper, averages=part[4], copies=part[5], grad_scale=grad_scale
            )


def _is_uniform(lists: tuple[Tensors, ...]) -> bool:
    """Whether one kernel serves all tensors: each list of one known type, all contiguous."""
    types = [{tensor.dtype for tensor in tensors} for tensors in lists]
    known = all(len(found) <= 1 and found <= TYPES.keys() for found in types)
    is_float32 = all(found <= {torch.float32} for found in (types[0], *types[2:5]))
    return known and is_float32 and all(all(map(Tensor.is_contiguous, t)) for t in lists)


def _run_uniform(lists: tuple[Tensors, ...], hyper: AdamHyper, scale: Tensor | None) -> None:
    params, grads, *_, averages, copies = lists
    if not params:
        return
    addresses = tuple(tuple(map(Tensor.data_ptr, tensors)) for tensors in lists)
    (beta1, beta2), (correction1, correction2) = hyper.betas, hyper.corrections
    decay = hyper.weight_decay
    for table in _tables(addresses, tuple(map(Tensor.numel, params)), params[0].device):
        _step[(len(table.owners),)](
            table.lines,
            table.owners,
            table.starts,
            scale,
            hyper.lr / correction1,
            1 / math.sqrt(correction2),
            hyper.eps,
            1 - beta1,
            beta2,
            1 - beta2,
            1 - hyper.lr * decay if hyper.decoupled else decay,
            1 - hyper.ema_decay,
            DECOUPLED=hyper.decoupled,
            AVERAGES=bool(averages),
            COPIES=bool(copies),
            ALIGNED=table.is_aligned,
            GRAD=TYPES[grads[0].dtype],
            COPY=TYPES[copies[0].dtype] if copies else tl.float32,
            PIECE=PIECE,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


@dataclass(frozen=True)
class _Table:
    """What the programs of one launch look up."""

    lines: Tensor
    """For each tensor the addresses of its six forms (0 for none), and its size."""
    owners: Tensor
    """For each program its tensor."""
    starts: Tensor
    """For each tensor its first program."""
    is_aligned: bool


@functools.lru_cache(maxsize=16)
def _tables(
    addresses: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], device: torch.device
) -> list[_Table]:
    """Make the tables of the tensors that lie on 16 bytes, and of those that do not.

    Optimizers step on the same tensors again and again, so they are made once.
    """
    absent = (0,) * len(sizes)
    lines = list(zip(*(column or absent for column in addresses), sizes))
    parts: dict[bool, list[tuple[int, ...]]] = defaultdict(list)
    for line in lines:
        if line[-1]:
            parts[all(address % 16 == 0 for address in line[:-1])].append(line)
    return [_table(part, device, is_aligned) for is_aligned, part in parts.items()]


def _table(lines: list[tuple[int, ...]], device: torch.device, is_aligned: bool) -> _Table:
    pieces = torch.tensor([triton.cdiv(line[-1], PIECE) for line in lines])
    owners = torch.arange(len(lines)).repeat_interleave(pieces)
    starts = pieces.cumsum(0) - pieces
    return _Table(
        torch.tensor(lines, dtype=torch.int64).to(device),
        owners.to(device, torch.int32),
        starts.to(device, torch.int32),
        is_aligned,
    )


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
    scale,
    numbers,
    DECOUPLED: tl.constexpr,
    AVERAGES: tl.constexpr,
    COPIES: tl.constexpr,
):
    rate, inverse_root, eps, toward_grad, beta2, toward_square, decay, toward_new = numbers
    param = tl.load(params, mask=mask)
    grad = tl.load(grads, mask=mask).to(tl.float32)
    if scale is not None:
        grad *= scale
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
    grad_scale,
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
    scale = None
    if grad_scale is not None:
        scale = tl.load(grad_scale)
        size = tl.where(scale == scale, size, 0)  # NaN: the mask of the last piece covers all
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
                scale,
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
                scale,
                numbers,
                DECOUPLED,
                AVERAGES,
                COPIES,
            )
