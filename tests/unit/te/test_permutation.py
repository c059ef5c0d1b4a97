import inspect

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from mindspeed.te.pytorch.permutation import (
    moe_permute,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)

T, E, H = 9, 4, 5


def case(topk=2, dtype=torch.float64):
    torch.manual_seed(topk)
    tokens = torch.randn(T, H).to(dtype).requires_grad_()
    probs = torch.rand(T, E).to(dtype)
    chosen = probs.topk(topk, dim=-1).indices
    routing_map = torch.zeros(T, E, dtype=torch.bool).scatter(1, chosen, True)
    return tokens, (probs * routing_map).requires_grad_(), routing_map


def megatron_permute(tokens, routing_map, probs, num_out_tokens):
    result = moe_utils.permute(tokens, routing_map, probs=probs, num_out_tokens=num_out_tokens)
    return result[:3]  # newer versions return more


def gradients(outputs, inputs):
    torch.manual_seed(5)
    grads = [torch.randn_like(out) for out in outputs]
    return torch.autograd.grad(outputs, inputs, grads)


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("count", [True, False])
def test_permute_equals_megatron(topk, count):
    tokens, probs, routing_map = case(topk)
    rows = T * topk if count else -1
    got, got_probs, _ = moe_permute_with_probs(tokens, probs, routing_map, num_out_tokens=rows)
    want, want_probs, _ = megatron_permute(tokens, routing_map, probs, T * topk)
    assert torch.equal(got, want) and torch.equal(got_probs, want_probs)
    for one, other in zip(
        gradients([got, got_probs], [tokens, probs]), gradients([want, want_probs], [tokens, probs])
    ):
        torch.testing.assert_close(one, other)
    alone, row_id_map = moe_permute(tokens, routing_map, num_out_tokens=None)
    assert torch.equal(alone, want)
    assert torch.equal(tokens[row_id_map[: len(want)] // E], want)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("topk", [1, 3])
def test_unpermute_equals_megatron(topk, weighted):
    tokens, probs, routing_map = case(topk)
    _, row_id_map = moe_permute(tokens, routing_map, T * topk)
    _, _, order = megatron_permute(tokens, routing_map, probs, T * topk)
    rows = torch.randn(T * topk, H, dtype=torch.float64, requires_grad=True)
    merging = probs if weighted else None
    got = moe_unpermute(rows, row_id_map, merging_probs=merging, restore_shape=tokens.shape)
    want = moe_utils.unpermute(rows, order, tokens.shape, probs=merging, routing_map=routing_map)
    torch.testing.assert_close(got, want)
    inputs = [rows, probs] if weighted else [rows]
    torch.testing.assert_close(gradients([got], inputs), gradients([want], inputs))


def test_fixed_capacity_equals_megatron():
    tokens, probs, _ = case()
    capacity = 3
    best = probs.topk(capacity, dim=0).indices
    routing_map = torch.zeros(T, E, dtype=torch.bool).scatter(0, best, True)
    got, got_probs, _ = moe_permute_with_probs(tokens, probs, routing_map, capacity * E)
    want, want_probs, *_ = moe_utils.permute(
        tokens, routing_map, probs=probs, num_out_tokens=capacity * E, drop_and_pad=True
    )
    assert torch.equal(got, want) and torch.equal(got_probs, want_probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_returns_the_tokens(dtype):
    tokens, probs, routing_map = case(topk=2, dtype=torch.float32)
    tokens = tokens.detach().to(dtype)
    weights = probs / probs.sum(-1, keepdim=True)
    rows, row_id_map = moe_permute(tokens, routing_map)
    back = moe_unpermute(rows, row_id_map, weights, tokens.shape)
    assert back.dtype == dtype
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(back.float(), tokens.float(), rtol=rtol, atol=1e-6)


def test_index_map_sorts_by_expert_and_comes_back():
    tokens, _, _ = case()
    experts = torch.tensor([[3, 0], [0, 1], [2, 3], [1, 0], [0, 2], [3, 1], [2, 0], [1, 2], [0, 3]])
    weights = torch.rand(T, 2, dtype=torch.float64, requires_grad=True)
    rows, row_id_map = moe_permute(tokens, experts, map_type="index")
    by_expert = [t for e in range(E) for t in range(T) if e in experts[t]]
    assert torch.equal(rows, tokens[by_expert])
    scaled = rows * torch.arange(1, 2 * T + 1).unsqueeze(1)
    back = moe_unpermute(scaled, row_id_map, weights, map_type="index")
    want = torch.zeros_like(tokens)
    for row, token in enumerate(by_expert):
        expert = next(e for e in range(E) if row < (experts <= e).sum())
        choice = experts[token].tolist().index(expert)
        want = want.index_add(
            0, torch.tensor([token]), (row + 1) * tokens[[token]] * weights[token, choice]
        )
    torch.testing.assert_close(back, want)
    torch.testing.assert_close(
        gradients([back], [tokens, weights]), gradients([want], [tokens, weights])
    )


@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_fewer_rows_drop_the_last(map_type):
    tokens, probs, routing_map = case(topk=2)
    given = routing_map if map_type == "mask" else probs.topk(2, dim=-1).indices
    whole, _ = moe_permute(tokens, given, map_type=map_type)
    cut, _ = moe_permute(tokens, given, num_out_tokens=7, map_type=map_type)
    assert torch.equal(cut, whole[:7])


def test_chunks_equal_megatron():
    x = torch.randn(10, H, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(10, dtype=torch.float64, requires_grad=True)
    sizes = torch.tensor([3, 0, 4, 1, 2])
    order = torch.tensor([2, 4, 1, 0, 3])
    got, got_probs = moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    want, want_probs = moe_utils.sort_chunks_by_idxs(x, sizes, order, probs=probs)
    assert torch.equal(got, want) and torch.equal(got_probs, want_probs)
    torch.testing.assert_close(
        gradients([got, got_probs], [x, probs]), gradients([want, want_probs], [x, probs])
    )
    assert torch.equal(moe_sort_chunks_by_index(x, sizes.view(5, 1), order), want)


def test_unknown_map_type():
    with pytest.raises(ValueError, match="map_type=table is not known: use mask or index"):
        moe_permute(torch.ones(2, 2), torch.ones(2, 2), map_type="table")


def test_signatures_take_what_megatron_passes():
    # moe_utils calls them with these keywords in every version.
    inspect.signature(moe_permute).bind(0, 0, num_out_tokens=None)
    inspect.signature(moe_unpermute).bind(0, 0, merging_probs=None, restore_shape=(1, 1))
