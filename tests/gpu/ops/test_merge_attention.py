"""The kernels that merge attention and add rows against the reference in float64."""

import pytest
import torch

from mindspeed.ops.merge_attention import add_rows, merge_attention, reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize(("heads", "size"), [(32, 128), (5, 72)])
def test_matches_float64(is_indexed, heads, size):
    torch.manual_seed(0)
    rows = torch.randperm(777, device="cuda")[:300] if is_indexed else None
    num_parts = 300 if is_indexed else 777
    out, part = (torch.randn(n, 2, heads, size, device="cuda") for n in (777, num_parts))
    lse, part_lse = (torch.randn(2, heads, n, device="cuda") * 5 for n in (777, num_parts))
    part = part.bfloat16()
    want = [x.double() for x in (out, lse)]
    reference.merge_attention(*want, part, part_lse, rows)
    merge_attention(out, lse, part, part_lse, rows)
    for got, exact in zip((out, lse), want):
        assert (got - exact).norm() / exact.norm() < 1e-6
    exact = out.double()
    reference.add_rows(exact, part, rows)
    add_rows(out, part, rows)
    torch.testing.assert_close(out, exact.float())
    if not is_indexed:
        before, want = part.flip(0), [torch.empty_like(exact), lse.double()]
        merge_attention(out, lse, part, part_lse, before=before)
        reference.merge_attention(*want, part, part_lse, before=before)
        for got, exact in zip((out, lse), want):
            assert (got - exact).norm() / exact.norm() < 1e-6
        add_rows(out, part, before=before)
        assert torch.equal(out, before.float() + part.float())
