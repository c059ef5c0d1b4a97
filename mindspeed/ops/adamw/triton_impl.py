"""One step of Adam or AdamW in Triton: all tensors of a list in one launch, each byte moved once.

A table holds the address of every tensor. Programs take chunks of equal size, whatever the sizes of
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

# A program updates CHUNK elements, BLOCK at a time: four float32 per thread, a 16-byte load of each
# tensor. With more per thread a 16-bit copy would need another layout, and a conversion to it.
CHUNK, BLOCK, NUM_WARPS = 8192, 1024, 8
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
    remainders: Tensors = (),
    grad_scale: Tensor | None = None,
) -> None:
    """Update params, exp_avgs and exp_avg_sqs in place, and the other lists where given."""
    lists = (params, grads, exp_avgs, exp_avg_sqs, averages, copies, remainders)
    if torch.compiler.is_compiling():  # a compiler has no addresses, and fuses lists by itself
        reference.adamw(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            hyper,
            averages=averages,
            copies=copies,
            remainders=remainders,
            grad_scale=grad_scale,
        )
        return
    scale = None if grad_scale is None else grad_scale.float()
    if _is_uniform(lists):
        _run_uniform(lists, hyper, scale)
        return
    kinds: dict[object, list[int]] = defaultdict(list)
    for index, row in enumerate(zip(*filter(None, lists))):
        is_contiguous = all(map(Tensor.is_contiguous, row))
        kinds[(is_contiguous, *(tensor.dtype for tensor in row))].append(index)
    for indices in kinds.values():
        part = tuple([tensors[i] for i in indices] if tensors else () for tensors in lists)
        if _is_uniform(part):
            _run_uniform(part, hyper, scale)
        else:
            p, g, exp_avg, exp_avg_sq, average, copy, remainder = part
            reference.adamw(
                p,
                g,
                exp_avg,
                exp_avg_sq,
                hyper,
                averages=average,
                copies=copy,
                remainders=remainder,
                grad_scale=grad_scale,
            )


def _is_uniform(lists: tuple[Tensors, ...]) -> bool:
    """Return whether one launch handles all tensors: one known dtype per list, all contiguous."""
    types = [{tensor.dtype for tensor in tensors} for tensors in lists]
    is_known = all(len(dtypes) <= 1 and dtypes <= TYPES.keys() for dtypes in types[:6])
    in_float32 = types[2:5] if types[6] else (types[0], *types[2:5])
    is_float32 = all(dtypes <= {torch.float32} for dtypes in in_float32)
    return is_known and is_float32 and all(all(map(Tensor.is_contiguous, t)) for t in lists)


def _run_uniform(lists: tuple[Tensors, ...], hyper: AdamHyper, scale: Tensor | None) -> None:
    params, grads, exp_avgs, exp_avg_sqs, averages, copies, remainders = lists
    if not params:
        return
    # Remainders are in the place of copies: there are never both.
    columns = (params, grads, exp_avgs, exp_avg_sqs, averages, copies or remainders)
    addresses = tuple(tuple(map(Tensor.data_ptr, tensors)) for tensors in columns)
    (beta1, beta2), (correction1, correction2) = hyper.betas, hyper.corrections
    decay = hyper.weight_decay
    for table in _tables(addresses, tuple(map(Tensor.numel, params)), params[0].device):
        _adamw_kernel[(len(table.tensor_ids),)](
            table.rows,
            table.tensor_ids,
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
            HAS_EMA=bool(averages),
            HAS_COPY=bool(copies),
            IN_HALVES=bool(remainders),
            IS_ALIGNED=table.is_aligned,
            GRAD_DTYPE=TYPES[grads[0].dtype],
            # Halves are loaded as bits.
            PARAM_DTYPE=tl.int16 if remainders else tl.float32,
            COPY_DTYPE=TYPES[copies[0].dtype] if copies else tl.int16,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


@dataclass(frozen=True)
class _Table:
    """The lookup table of one launch."""

    rows: Tensor
    """Per tensor: six addresses (param, grad, moments, average, copy or remainder; 0 for none) and
    its size."""
    tensor_ids: Tensor
    """Per program: its tensor."""
    starts: Tensor
    """Per tensor: its first program."""
    is_aligned: bool


@functools.lru_cache(maxsize=16)
def _tables(
    addresses: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], device: torch.device
) -> list[_Table]:
    """Return the tables of the 16-byte aligned tensors, and of the others.

    Optimizers step on the same tensors again and again, so the tables are cached.
    """
    absent = (0,) * len(sizes)
    rows = list(zip(*(column or absent for column in addresses), sizes))
    parts: dict[bool, list[tuple[int, ...]]] = defaultdict(list)
    for row in rows:
        if row[-1]:
            parts[all(address % 16 == 0 for address in row[:-1])].append(row)
    return [_table(part, device, is_aligned) for is_aligned, part in parts.items()]


def _table(rows: list[tuple[int, ...]], device: torch.device, is_aligned: bool) -> _Table:
    chunks = torch.tensor([triton.cdiv(row[-1], CHUNK) for row in rows])
    tensor_ids = torch.arange(len(rows)).repeat_interleave(chunks)
    starts = chunks.cumsum(0) - chunks
    return _Table(
        torch.tensor(rows, dtype=torch.int64).to(device),
        tensor_ids.to(device, torch.int32),
        starts.to(device, torch.int32),
        is_aligned,
    )


@triton.jit
def _load_ptr(row_ptr, index: tl.constexpr, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    ptr = tl.load(row_ptr + index).to(tl.pointer_type(DTYPE))
    if IS_ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def _join(high, low, marked):
    """Return the float32 weights and second moments of halves; see `halves`."""
    bits = marked.to(tl.int32, bitcast=True)
    low = low.to(tl.int32) + tl.where(bits < 0, 0x10000, 0)
    weight = ((high.to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    return weight, (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _split(weight, moment):
    """Undo `_join`."""
    bits = weight.to(tl.int32, bitcast=True)
    high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    high = tl.where(weight == weight, high, (bits >> 16) | 0x40)
    low = tl.where(weight == weight, bits - (high << 16), 0)
    marked = moment.to(tl.int32, bitcast=True) | tl.where(low == 0x8000, -2147483648, 0)
    return high.to(tl.int16), low.to(tl.int16), marked.to(tl.float32, bitcast=True)


@triton.jit
def _update(
    param_ptrs,
    grad_ptrs,
    exp_avg_ptrs,
    exp_avg_sq_ptrs,
    ema_ptrs,
    copy_ptrs,
    mask,
    scale,
    hyper,
    DECOUPLED: tl.constexpr,
    HAS_EMA: tl.constexpr,
    HAS_COPY: tl.constexpr,
    IN_HALVES: tl.constexpr,
):
    step_size, rsqrt_correction2, eps, one_minus_beta1, beta2, one_minus_beta2, decay, ema_rate = (
        hyper
    )
    param = tl.load(param_ptrs, mask=mask)
    grad = tl.load(grad_ptrs, mask=mask).to(tl.float32)
    if scale is not None:
        grad *= scale
    exp_avg = tl.load(exp_avg_ptrs, mask=mask)
    exp_avg_sq = tl.load(exp_avg_sq_ptrs, mask=mask)
    if IN_HALVES:
        param, exp_avg_sq = _join(param, tl.load(copy_ptrs, mask=mask), exp_avg_sq)
    if DECOUPLED:
        param *= decay
    else:
        grad += decay * param
    exp_avg += one_minus_beta1 * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * grad * grad
    param -= step_size * exp_avg / (tl.sqrt_rn(exp_avg_sq) * rsqrt_correction2 + eps)
    if IN_HALVES:
        high, low, exp_avg_sq = _split(param, exp_avg_sq)
        tl.store(param_ptrs, high, mask=mask)
        tl.store(copy_ptrs, low, mask=mask)
    else:
        tl.store(param_ptrs, param, mask=mask)
    tl.store(exp_avg_ptrs, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptrs, exp_avg_sq, mask=mask)
    if HAS_EMA:
        ema = tl.load(ema_ptrs, mask=mask)
        tl.store(ema_ptrs, ema + ema_rate * (param - ema), mask=mask)
    if HAS_COPY:
        tl.store(copy_ptrs, param.to(copy_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _adamw_kernel(
    table_ptr,
    tensor_ids_ptr,
    starts_ptr,
    grad_scale_ptr,
    step_size,
    rsqrt_correction2,
    eps,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    decay,
    ema_rate,
    DECOUPLED: tl.constexpr,
    HAS_EMA: tl.constexpr,
    HAS_COPY: tl.constexpr,
    IN_HALVES: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    COPY_DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor_id = tl.load(tensor_ids_ptr + tl.program_id(0))
    first = tl.load(starts_ptr + tensor_id)
    row_ptr = table_ptr + tensor_id.to(tl.int64) * 7
    param_ptr = _load_ptr(row_ptr, 0, PARAM_DTYPE, IS_ALIGNED)
    grad_ptr = _load_ptr(row_ptr, 1, GRAD_DTYPE, IS_ALIGNED)
    exp_avg_ptr = _load_ptr(row_ptr, 2, tl.float32, IS_ALIGNED)
    exp_avg_sq_ptr = _load_ptr(row_ptr, 3, tl.float32, IS_ALIGNED)
    ema_ptr = _load_ptr(row_ptr, 4, tl.float32, IS_ALIGNED)
    copy_ptr = _load_ptr(row_ptr, 5, COPY_DTYPE, IS_ALIGNED)
    size = tl.load(row_ptr + 6)
    scale = None
    if grad_scale_ptr is not None:
        scale = tl.load(grad_scale_ptr)
        size = tl.where(scale == scale, size, 0)  # NaN: mask out every element
    hyper = (
        step_size,
        rsqrt_correction2,
        eps,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        decay,
        ema_rate,
    )
    start = (tl.program_id(0) - first).to(tl.int64) * CHUNK
    if start + CHUNK <= size:  # masked loads are narrower, so only the last chunk has a mask
        for offset in range(0, CHUNK, BLOCK):
            offs = start + offset + tl.arange(0, BLOCK)
            _update(
                param_ptr + offs,
                grad_ptr + offs,
                exp_avg_ptr + offs,
                exp_avg_sq_ptr + offs,
                ema_ptr + offs,
                copy_ptr + offs,
                None,
                scale,
                hyper,
                DECOUPLED,
                HAS_EMA,
                HAS_COPY,
                IN_HALVES,
            )
    else:
        for offset in range(0, CHUNK, BLOCK):
            offs = start + offset + tl.arange(0, BLOCK)
            _update(
                param_ptr + offs,
                grad_ptr + offs,
                exp_avg_ptr + offs,
                exp_avg_sq_ptr + offs,
                ema_ptr + offs,
                copy_ptr + offs,
                offs < size,
                scale,
                hyper,
                DECOUPLED,
                HAS_EMA,
                HAS_COPY,
                IN_HALVES,
            )
