"""The choice of experts as one Triton kernel, and its gradient as another.

A program holds the logits of some tokens as a tile (T, G, S) of G groups of S experts; without
groups G is 1. The best is taken out k times by a maximum and the lowest expert that has it, so that
equals are chosen as in the reference. Results are written densely: no scatter, no atomics. Backward
keeps the logits and the choice, and computes the scores again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed.ops.launch import launch
from mindspeed.ops.router_topk import reference
from mindspeed.ops.router_topk.reference import Routing

EPSILON = tl.constexpr(reference.EPSILON)
POST_SOFTMAX, PRE_SOFTMAX, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_TILE = 512  # logits of a warp: rows lie within it, so that a maximum needs no shared memory


def router_topk(
    logits: Tensor,
    topk: int,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: Tensor | None = None,
    with_scores: bool = False,
) -> Routing:
    """Choose `topk` experts for each token of logits (T, E)."""
    is_sigmoid = score_function == "sigmoid"
    if logits.dtype == torch.float64:
        return reference.router_topk(
            logits,
            topk,
            score_function=score_function,
            use_pre_softmax=use_pre_softmax,
            num_groups=num_groups,
            group_topk=group_topk,
            scaling_factor=scaling_factor,
            expert_bias=expert_bias,
            with_scores=with_scores,
        )
    kind = SIGMOID.value if is_sigmoid else int(use_pre_softmax)
    bias = expert_bias.float().contiguous() if is_sigmoid and expert_bias is not None else None
    groups = (num_groups or 1, group_topk) if group_topk else (1, 1)
    rule = _Rule(kind, topk, *groups, scaling_factor or 1.0)
    return Routing(*_RouterTopK.apply(logits, bias, rule, with_scores))


@dataclass(frozen=True, slots=True)
class _Rule:
    """How experts are chosen."""

    kind: int
    topk: int
    num_groups: int
    group_topk: int
    scale: float


class _RouterTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        bias: Tensor | None,
        rule: _Rule,
        with_scores: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logits = logits.contiguous()
        probs = torch.empty_like(logits)
        chosen = torch.empty_like(logits, dtype=torch.bool)
        scores = torch.empty_like(logits, dtype=torch.float32) if with_scores else None
        if logits.numel():
            size = logits.shape[1] // rule.num_groups
            block_g, block_s = map(triton.next_power_of_2, (rule.num_groups, size))
            block_t, num_warps = _tile(block_g * block_s)
            launch(
                _choose,
                (triton.cdiv(len(logits), block_t),),
                logits,
                bias,
                probs,
                chosen.view(torch.uint8),
                scores,
                len(logits),
                rule.num_groups,
                size,
                rule.scale,
                KIND=rule.kind,
                TOP_K=rule.topk,
                GROUP_TOP_K=rule.group_topk if rule.group_topk < rule.num_groups else 0,
                BLOCK_T=block_t,
                BLOCK_G=block_g,
                BLOCK_S=block_s,
                num_warps=num_warps,
            )
        ctx.save_for_backward(logits, chosen)
        ctx.rule = rule
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)
        return probs, chosen, scores

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_probs: Tensor | None, _: None, grad_scores: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, chosen = ctx.saved_tensors
        num_tokens, num_experts = logits.shape
        grad = torch.empty_like(logits)
        if grad.numel():
            block_e = triton.next_power_of_2(num_experts)
            block_t, num_warps = _tile(block_e)
            launch(
                _choose_backward,
                (triton.cdiv(num_tokens, block_t),),
                logits,
                chosen.view(torch.uint8),
                grad_probs,
                grad_scores,
                grad,
                num_tokens,
                num_experts,
                *_strides(grad_probs),
                *_strides(grad_scores),
                ctx.rule.scale,
                KIND=ctx.rule.kind,
                TOP_K=ctx.rule.topk,
                BLOCK_T=block_t,
                BLOCK_E=block_e,
                num_warps=num_warps,
            )
        return grad, None, None, None


def _tile(width: int) -> tuple[int, int]:
    """Return the tokens and the warps of a program for rows of `width` logits."""
    return max(_TILE // width, 1), min(max(width // _TILE, 1), 16)


def _strides(x: Tensor | None) -> tuple[int, int]:
    """Return the strides of a gradient: that of a sum over tokens is one row, expanded."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


@triton.jit
def _take_best(ranked, free, ids, none):
    """Return a mask of the lowest id that has the highest rank of the free entries of a row.

    A row is all of a tile (T, G, S) but its first dimension.
    """
    best = tl.max(tl.max(tl.where(free, ranked, float("-inf")), axis=2), axis=1)
    is_best = free & (ranked == best[:, None, None])
    first = tl.min(tl.min(tl.where(is_best, ids, none), axis=2), axis=1)
    return is_best & (ids == first[:, None, None])


@triton.jit
def _best_groups(
    scores,
    valid,
    group_ids,
    offs_s,
    num_groups,
    NUM_SUMMED: tl.constexpr,
    GROUP_TOP_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Return a mask (T, G, 1) of the groups whose best experts sum to most."""
    free = valid
    strength = tl.zeros_like(group_ids).to(tl.float32)
    for _ in range(NUM_SUMMED):
        best = tl.max(tl.where(free, scores, float("-inf")), axis=2)[:, :, None]
        first = tl.min(tl.where(free & (scores == best), offs_s, BLOCK_S), axis=2)[:, :, None]
        free = free & (offs_s != first)
        strength += best
    strength = _nan_is_highest(strength)
    free_groups = group_ids < num_groups
    allowed = group_ids < 0
    for _ in range(GROUP_TOP_K):
        taken = _take_best(strength, free_groups, group_ids, num_groups)
        allowed = allowed | taken
        free_groups = free_groups & ~taken
    return allowed


@triton.jit
def _nan_is_highest(x):
    # As for torch: it is chosen and the weights show it, and every token has k experts.
    return tl.where(x != x, float("inf"), x)


@triton.jit
def _row_sum(x):
    return tl.sum(tl.sum(x, axis=2), axis=1)[:, None, None]


@triton.jit
def _row_max(x):
    return tl.max(tl.max(x, axis=2), axis=1)[:, None, None]


@triton.jit
def _choose(
    logits_ptr,
    bias_ptr,
    probs_ptr,
    chosen_ptr,
    scores_ptr,
    num_tokens,
    num_groups,
    group_size,
    scale,
    KIND: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP_TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    group_ids = tl.arange(0, BLOCK_G)[None, :, None] + tl.zeros((BLOCK_T, 1, 1), tl.int32)
    offs_s = tl.arange(0, BLOCK_S)[None, None, :]
    ids = group_ids * group_size + offs_s
    valid = (group_ids < num_groups) & (offs_s < group_size)
    mask = valid & (tokens < num_tokens)[:, None, None]
    num_experts = num_groups * group_size
    offs = tokens.to(tl.int64)[:, None, None] * num_experts + ids
    x = tl.load(logits_ptr + offs, mask=mask, other=0.0).to(tl.float32)

    # Sums and maxima leave out what pads the tile.
    if KIND == SIGMOID:
        values = tl.where(valid, tl.sigmoid(x), 0.0)
    else:
        highest = _row_max(tl.where(valid, x, float("-inf")))
        values = tl.where(valid, tl.exp(x - highest), 0.0)
    total = _row_sum(values)
    if scores_ptr is not None:
        if KIND == SIGMOID:
            tl.store(scores_ptr + offs, values / (total + EPSILON), mask=mask)
        else:
            tl.store(scores_ptr + offs, values / total, mask=mask)

    ranked = x
    strength = x
    if KIND == PRE_SOFTMAX:
        values = values / total
        strength = values
    elif KIND == SIGMOID:
        strength = values
        if bias_ptr is not None:
            strength += tl.load(bias_ptr + ids, mask=valid, other=0.0)
            ranked = strength

    free = valid
    if GROUP_TOP_K > 0:
        free = free & _best_groups(
            _nan_is_highest(strength),
            valid,
            group_ids,
            offs_s,
            num_groups,
            TOP_K // GROUP_TOP_K,
            GROUP_TOP_K,
            BLOCK_S,
        )
    ranked = _nan_is_highest(ranked)
    chosen = ids < 0
    for _ in range(TOP_K):
        taken = _take_best(ranked, free, ids, num_experts)
        chosen = chosen | taken
        free = free & ~taken

    probs = tl.where(chosen, values, 0.0)
    if KIND == POST_SOFTMAX:
        highest = _row_max(tl.where(chosen, x, float("-inf")))
        probs = tl.where(chosen, tl.exp(x - highest), 0.0)
        probs = probs / _row_sum(probs)
    elif KIND == SIGMOID and TOP_K > 1:
        probs = probs / (_row_sum(probs) + EPSILON)
    tl.store(probs_ptr + offs, probs * scale, mask=mask)
    tl.store(chosen_ptr + offs, chosen.to(tl.uint8), mask=mask)


@triton.jit
def _choose_backward(
    logits_ptr,
    chosen_ptr,
    grad_probs_ptr,
    grad_scores_ptr,
    grad_ptr,
    num_tokens,
    num_experts,
    stride_probs_t,
    stride_probs_e,
    stride_scores_t,
    stride_scores_e,
    scale,
    KIND: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    tokens = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    valid = experts < num_experts
    mask = valid & (tokens < num_tokens)
    offs = tokens * num_experts + experts
    x = tl.load(logits_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    chosen = tl.load(chosen_ptr + offs, mask=mask, other=0) != 0
    if KIND == SIGMOID:
        values = tl.where(valid, tl.sigmoid(x), 0.0)
    else:
        highest = tl.max(tl.where(valid, x, float("-inf")), axis=1)[:, None]
        values = tl.where(valid, tl.exp(x - highest), 0.0)
        values = values / tl.sum(values, axis=1)[:, None]

    # Gradients of `values`, for a softmax those before the mean is subtracted.
    grad = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if grad_probs_ptr is not None:
        ptrs = grad_probs_ptr + tokens * stride_probs_t + experts * stride_probs_e
        dp = tl.load(ptrs, mask=mask & chosen, other=0.0).to(tl.float32) * scale
        if KIND == SIGMOID:
            if TOP_K > 1:
                dp = tl.where(chosen, _over_sum(dp, tl.where(chosen, values, 0.0)), 0.0)
            grad += dp * values * (1 - values)
        elif KIND == PRE_SOFTMAX:
            grad += values * (dp - tl.sum(dp * values, axis=1)[:, None])
        else:
            highest = tl.max(tl.where(chosen, x, float("-inf")), axis=1)[:, None]
            probs = tl.where(chosen, tl.exp(x - highest), 0.0)
            probs = probs / tl.sum(probs, axis=1)[:, None]
            grad += probs * (dp - tl.sum(dp * probs, axis=1)[:, None])
    if grad_scores_ptr is not None:
        ptrs = grad_scores_ptr + tokens * stride_scores_t + experts * stride_scores_e
        ds = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        if KIND == SIGMOID:
            grad += _over_sum(ds, values) * values * (1 - values)
        else:
            grad += values * (ds - tl.sum(ds * values, axis=1)[:, None])
    tl.store(grad_ptr + offs, grad, mask=mask)


@triton.jit
def _over_sum(grad, values):
    """Return the gradient of values whose quotients by their sum have the gradient `grad`."""
    total = tl.sum(values, axis=1)[:, None] + EPSILON
    return (grad - tl.sum(grad * values, axis=1)[:, None] / total) / total
