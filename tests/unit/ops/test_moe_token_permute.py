"""Permute and unpermute, against a sort and sums written out."""

import pytest
import torch

from mindspeed.ops.moe_token_permute import moe_token_permute, moe_token_unpermute

T, H, K = 6, 5, 2
EXPERTS = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2], [1, 0]])


def order():
    """The pairs (token, choice) in the order of experts, earlier pairs first."""
    pairs = [(int(EXPERTS[t, j]), t, j) for t in range(T) for j in range(K)]
    return [(t, j) for _, t, j in sorted(pairs, key=lambda pair: pair[0])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_out", [None, 12, 7, 20])
def test_permute_sorts_by_expert(dtype, num_out):
    tokens = torch.randn(T, H).to(dtype)
    rows, row_ids = moe_token_permute(tokens, EXPERTS, num_out)
    count = min(num_out or 12, 12)
    assert torch.equal(rows, torch.stack([tokens[t] for t, _ in order()])[:count])
    assert row_ids.dtype == torch.int32
    assert [order()[row_id] for row_id in row_ids] == [(t, j) for t in range(T) for j in range(K)]


@pytest.mark.parametrize("num_out", [None, 7])
def test_unpermute_weighs_and_sums(num_out):
    rows, row_ids = moe_token_permute(torch.randn(T, H, dtype=torch.float64), EXPERTS, num_out)
    rows = torch.randn_like(rows)
    probs = torch.rand(T, K, dtype=torch.float64)
    expected = torch.zeros(T, H, dtype=torch.float64)
    for row, (t, j) in zip(rows, order()):
        expected[t] += probs[t, j] * row
    torch.testing.assert_close(moe_token_unpermute(rows, row_ids, probs), expected)


def test_one_choice_without_weights_comes_back():
    tokens = torch.randn(T, H)
    rows, row_ids = moe_token_permute(tokens, EXPERTS[:, 0])
    assert not torch.equal(rows, tokens)
    assert torch.equal(moe_token_unpermute(rows, row_ids), tokens)


@pytest.mark.parametrize("num_out", [None, 7])
def test_gradients(num_out):
    tokens = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(T, K, dtype=torch.float64, requires_grad=True)

    def both(tokens, probs):
        rows, row_ids = moe_token_permute(tokens, EXPERTS, num_out)
        return rows, moe_token_unpermute(rows.sin(), row_ids, probs)

    assert torch.autograd.gradcheck(both, (tokens, probs))


@pytest.mark.parametrize("choices", [(0,), (0, 2)])
def test_no_tokens(choices):
    tokens = torch.randn(0, H, requires_grad=True)
    rows, row_ids = moe_token_permute(tokens, torch.zeros(choices, dtype=torch.long))
    assert rows.shape == (0, H) and row_ids.shape == (0,)
    probs = torch.rand(choices) if len(choices) == 2 else None
    back = moe_token_unpermute(rows, row_ids, probs)
    (grad,) = torch.autograd.grad(back.sum(), tokens)
    assert back.shape == grad.shape == (0, H)


def test_padded_mode():
    tokens = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(T, 3, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([[0, 2], [5, 1], [2, 2]])
    rows, row_ids = moe_token_permute(tokens, chosen, padded_mode=True)
    assert torch.equal(rows, tokens[[0, 2, 5, 1, 2, 2]]) and torch.equal(row_ids, chosen)
    back = moe_token_unpermute(rows, row_ids, probs, True, (T, H))
    expected = torch.zeros(T, H, dtype=torch.float64)
    for row, token in enumerate([0, 2, 5, 1, 2, 2]):
        expected[token] += tokens[token].detach() * probs[token, row // 2].detach()
    torch.testing.assert_close(back.detach(), expected)
    assert torch.autograd.gradcheck(
        lambda t, p: moe_token_unpermute(
            moe_token_permute(t, chosen, padded_mode=True)[0], chosen, p, True, (T, H)
        ),
        (tokens, probs),
    )


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"got \(6, 5\) and \(5, 2\) of torch.int64"):
        moe_token_permute(torch.ones(T, H), EXPERTS[:5])
    with pytest.raises(ValueError, match="num_out_tokens=-1"):
        moe_token_permute(torch.ones(T, H), EXPERTS, -1)
    with pytest.raises(ValueError, match=r"got \(12,\) and \(6, 3\)"):
        moe_token_unpermute(torch.ones(12, H), torch.arange(12), torch.ones(T, 3))
    with pytest.raises(ValueError, match="needs restore_shape"):
        moe_token_unpermute(torch.ones(12, H), torch.arange(12), padded_mode=True)
