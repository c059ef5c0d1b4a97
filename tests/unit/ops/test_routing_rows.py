import pytest
import torch

from mindspeed.ops.routing_rows import reference, routing_rows, triton_impl
from tests.unit.ops.pairwise import pairwise

IMPLS = pytest.mark.parametrize("impl", [reference, triton_impl], ids=["reference", "triton"])


def written_out(mask, num_rows):
    tokens, experts = mask.shape
    pairs = [t * experts + e for e in range(experts) for t in range(tokens) if mask[t, e]]
    num_rows = len(pairs) if num_rows is None else num_rows
    kept = pairs[:num_rows]
    row_of = {pair: row for row, pair in enumerate(kept)}
    by_token = sorted(kept)
    starts = [sum(pair < t * experts for pair in kept) for t in range(tokens + 1)]
    spare = num_rows - len(kept)
    parts = kept + [mask.numel()] * spare, [row_of[pair] for pair in by_token], by_token, starts
    return parts, [sum(pair % experts < e for pair in kept) for e in range(experts + 1)]


@pairwise(
    IMPLS,
    pytest.mark.parametrize("shape", [(9, 4), (70, 3), (5, 1), (3, 130), (1, 7)], ids=str),
    pytest.mark.parametrize("rows", [None, 0, 4, 500]),
    pytest.mark.parametrize("dtype", [torch.bool, torch.int64]),
)
def test_equals_what_is_written_out(impl, shape, rows, dtype, monkeypatch):
    monkeypatch.setattr(triton_impl, "_TILE", 64)  # several blocks
    torch.manual_seed(1)
    mask = torch.rand(shape) < 0.4
    got, bounds = impl.routing_rows(mask.to(dtype), rows)
    pair_of_row, rows_by_token, pairs, starts = got
    expected, expected_bounds = written_out(mask, rows)
    assert pair_of_row.tolist() == expected[0]
    count = len(expected[1])
    assert rows_by_token[:count].tolist() == expected[1]
    assert pairs[:count].tolist() == expected[2]
    assert starts.tolist() == expected[3] and starts[-1] == count
    assert bounds.tolist() == expected_bounds
    assert {t.dtype for t in (*got, bounds)} == {torch.int32}
    assert len(pairs) == len(rows_by_token) == len(pair_of_row)
    assert (pairs[count:] == mask.numel()).all()


@IMPLS
def test_no_tokens_and_transposed_masks(impl):
    parts, bounds = impl.routing_rows(torch.zeros(0, 4, dtype=torch.bool))
    assert [len(part) for part in parts] == [0, 0, 0, 1]
    assert bounds.tolist() == [0] * 5
    mask = (torch.rand(4, 9) < 0.5).t()
    parts, bounds = impl.routing_rows(mask)
    expected, expected_bounds = written_out(mask, None)
    assert [part.tolist() for part in parts] == list(expected)
    assert bounds.tolist() == expected_bounds


def test_refuses_what_is_no_mask():
    with pytest.raises(ValueError, match=r"needs a mask \(T, E\), got \(3,\) of torch.bool"):
        routing_rows(torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="of torch.float32"):
        routing_rows(torch.ones(3, 3))
    with pytest.raises(ValueError, match="num_rows=-1"):
        routing_rows(torch.ones(3, 3, dtype=torch.bool), -1)
