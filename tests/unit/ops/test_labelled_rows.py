"""Losses of labelled rows only: those of all rows under a mask, and the same gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.ops.linear_cross_entropy import linear_cross_entropy
from mindspeed.ops.linear_cross_entropy.labelled_rows import IGNORED, MAX_SHARE, LabelledRows

B, S, H, V = 3, 70, 5, 11


def mask_of(share, shape=(B, S), seed=0):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share).float()


@given(st.integers(1, 4), st.integers(1, 300), st.floats(0, 1, allow_nan=False), st.integers(0, 99))
def test_rows_are_those_of_the_mask(batch, length, share, seed):
    mask = mask_of(share, (batch, length), seed)
    rows, total = LabelledRows.of(mask), mask.numel()
    expected = [s * batch + b for s in range(length) for b in range(batch) if mask[b, s]]
    if rows is None:
        # Rounded up there are at most a 64th more than have a label, or one if there are few.
        assert len(expected) + max(total / 64, 1) > MAX_SHARE * total
        return
    assert rows.index[: rows.count].tolist() == expected
    assert rows.count <= len(rows.index) <= MAX_SHARE * total
    assert len(rows.index) - rows.count <= max(total / 64, 1)


def test_few_shapes_repeat():
    shapes = {len(LabelledRows.of(mask_of(0.6, (4, 1024), seed)).index) for seed in range(20)}
    counts = {LabelledRows.of(mask_of(0.6, (4, 1024), seed)).count for seed in range(20)}
    assert len(counts) > 10 and len(shapes) <= 4
    assert all(size % 64 == 0 for size in shapes)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.8])
def test_losses_and_gradients_are_those_of_all_rows(share):
    torch.manual_seed(1)
    mask = mask_of(share)
    rows, by_position = LabelledRows.of(mask), mask.t()
    hidden, weight = torch.randn(S, B, H).double(), torch.randn(V, H).double()
    labels, grad = torch.randint(V, (S, B)), torch.rand(S, B).double()
    results = []
    for some in (None, rows):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        if some is None:
            losses = linear_cross_entropy(*leaves, labels)
        else:
            picked, few = some.pick(leaves[0], labels)
            assert len(picked) == len(few) < S * B
            losses = some.spread(linear_cross_entropy(picked, leaves[1], few), like=labels)
        losses = losses * by_position
        results.append([losses.detach(), *torch.autograd.grad(losses, leaves, grad)])
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_padding_has_no_label_and_no_gradient():
    """Row 0, which fills the index up, keeps the gradient of its own label."""
    mask = torch.zeros(1, 128)
    mask[0, [0, 5, 6]] = 1
    rows = LabelledRows.of(mask)
    assert rows.index.tolist() == [0, 5, 6, 0] and rows.count == 3
    hidden = torch.randn(128, 1, H, requires_grad=True)
    picked, labels = rows.pick(hidden, torch.full((128, 1), 7))
    assert labels.tolist() == [7, 7, 7, IGNORED]
    picked.backward(torch.arange(1.0, 5.0)[:, None].expand(4, H))
    assert hidden.grad[[0, 5, 6], 0, 0].tolist() == [1, 2, 3]
    assert hidden.grad.count_nonzero() == 3 * H
    losses = rows.spread(torch.tensor([1.0, 2.0, 3.0, 4.0]), like=mask.t())
    assert losses.flatten()[[0, 5, 6]].tolist() == [1, 2, 3] and losses.sum() == 6
