"""Attention over parts of the keys, merged in place, against float64; sums of rows."""

import pytest
import torch

from mindspeed.ops.merge_attention import add_rows, merge_attention, triton_impl

S, B, N, V = 9, 2, 3, 12
ROWS = torch.tensor([7, 0, 3, 4])
MERGES = pytest.mark.parametrize("merge", [merge_attention, triton_impl.merge_attention])
SUMS = pytest.mark.parametrize("add", [add_rows, triton_impl.add_rows])


def draw(seed, rows=S, keys=5):
    """Return scores (B, N, rows, keys) and values (keys, B, N, V) in float64."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, N, rows, keys, dtype=torch.float64, generator=generator) * 3
    return scores, torch.randn(keys, B, N, V, dtype=torch.float64, generator=generator)


def attend(scores, values):
    return torch.einsum("bnst,tbnv->sbnv", scores.softmax(-1), values), scores.logsumexp(-1)


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@MERGES
@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_make_the_whole(merge, rows, dtype):
    (scores, values), index = draw(0), torch.arange(S) if rows is None else rows
    more, more_values = draw(1, len(index))
    wide = torch.promote_types(dtype, torch.float32)
    out, lse = (x.to(wide) for x in attend(scores, values))
    part, part_lse = attend(more, more_values)
    part = part.to(dtype)
    merge(out, lse, part, part_lse.to(wide), rows)
    want, want_lse = attend(scores, values)
    # The part in its own dtype, everything else exact.
    rest = torch.exp(part_lse - torch.logaddexp(want_lse[..., index], part_lse))
    share = rest.permute(2, 0, 1).unsqueeze(-1)
    want[index] = want[index] * (1 - share) + part.double() * share
    want_lse[..., index] = torch.cat([scores[:, :, index], more], -1).logsumexp(-1)
    limit = 1e-15 if wide == torch.float64 else 1e-6
    assert error(out, want) < limit and error(lse, want_lse) < limit
    both = torch.cat([scores[:, :, index], more], -1).softmax(-1)
    whole = torch.einsum("bnst,tbnv->sbnv", both, torch.cat([values, more_values]))
    assert error(out[index], whole) < max(limit, torch.finfo(dtype).eps)


@MERGES
def test_strided_tensors_and_rows_that_are_a_view(merge):
    out, lse = (x.float() for x in attend(*draw(0)))
    part, part_lse = (x.float() for x in attend(*draw(1)))
    want, want_lse = out.clone(), lse.clone()
    merge(want, want_lse, part, part_lse)
    # Kernels return (B, S, N, V); values of smaller heads are the first part of padded ones.
    strided = torch.nn.functional.pad(part, (0, 4)).transpose(0, 1).contiguous().transpose(0, 1)
    transposed = lse.transpose(1, 2).contiguous().transpose(1, 2)
    before = out.clone()
    merge(out[2:6], transposed[..., 2:6], strided[2:6, ..., :V], part_lse[..., 2:6])
    torch.testing.assert_close(out[2:6], want[2:6])
    torch.testing.assert_close(transposed[..., 2:6], want_lse[..., 2:6])
    assert torch.equal(out[:2], before[:2]) and torch.equal(out[6:], before[6:])


@MERGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_first_result_may_be_elsewhere(merge, dtype):
    (first, lse), (part, part_lse) = (attend(*draw(seed)) for seed in (0, 1))
    first, part = (x.to(dtype).transpose(0, 1).contiguous().transpose(0, 1) for x in (first, part))
    want, want_lse = first.double(), lse.clone()
    merge_attention(want, want_lse, part, part_lse)
    out, lse = torch.full((S, B, N, V), float("nan")), lse.float()
    merge(out, lse, part, part_lse.float(), before=first)
    assert error(out, want) < 1e-6 and error(lse, want_lse) < 1e-6


@MERGES
def test_rows_without_keys_count_for_nothing(merge):
    some, some_lse = (x.float() for x in attend(*draw(0)))
    nothing, least = torch.zeros(S, B, N, V), torch.full((B, N, S), float("-inf"))
    for first, second in (
        ((some, some_lse), (nothing, least)),
        ((nothing, least), (some, some_lse)),
    ):
        out, lse = (x.clone() for x in first)
        merge(out, lse, *second)
        torch.testing.assert_close(out, some)
        torch.testing.assert_close(lse, some_lse)
    merge(nothing, least, nothing.clone(), least.clone())
    assert not nothing.any() and least.eq(float("-inf")).all()


@SUMS
@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rows(add, rows, dtype):
    total, x = torch.randn(S, 5, 130), torch.randn(S if rows is None else len(rows), 5, 130)
    x, want = x.to(dtype), total.clone()
    want[torch.arange(S) if rows is None else rows] += x.float()
    add(total, x, rows)
    assert torch.equal(total, want)


@SUMS
def test_a_first_summand_may_be_elsewhere(add):
    total, (x, before) = torch.empty(S, 5, 130), torch.randn(2, S, 5, 130).bfloat16()
    add(total, x, before=before)
    assert torch.equal(total, x.float() + before.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, lse: (out, lse, out[..., 1:], lse), r"use \(S, B, N, V\) outputs"),
        (lambda out, lse: (out, lse[0], out, lse), r"use \(B, N, S\) statistics"),
        (lambda out, lse: (out, lse, out[1:], lse), "8 rows were given for 9"),
        (lambda out, lse: (out.half(), lse, out, lse), "use float32 or float64"),
        (lambda out, lse: (out, lse, out, lse, None, out[1:]), "use one shape, and no index"),
    ],
)
def test_what_does_not_match_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        merge_attention(*change(torch.zeros(S, B, N, V), torch.zeros(B, N, S)))
    with pytest.raises(ValueError, match="do not match"):
        add_rows(torch.zeros(3, 2), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="one int64 index for each"):
        add_rows(torch.zeros(3, 2), torch.zeros(1, 2), torch.zeros(1, dtype=torch.int32))
