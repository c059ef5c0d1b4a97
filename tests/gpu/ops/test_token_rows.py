"""Tokens to rows and back on the GPU: the kernels against the reference in float64."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.moe_token_permute import moe_token_permute, moe_token_unpermute
from mindspeed.ops.routing_rows import reference as routing
from mindspeed.ops.routing_rows import routing_rows
from mindspeed.ops.token_rows import gather_rows, reference, spread_rows
from mindspeed.te.pytorch.permutation import moe_permute_with_probs, moe_unpermute

pytestmark = pytest.mark.gpu
SHAPES = pytest.mark.parametrize(
    "shape", [(4096, 2048, 8, 64), (333, 777, 3, 10), (5, 1, 1, 4), (64, 7168, 8, 256)], ids=str
)


def case(shape, dtype):
    torch.manual_seed(0)
    where = device.current().torch_device
    tokens, hidden, choices, experts = shape
    x = torch.randn(tokens, hidden, device=where).to(dtype)
    probs, chosen = torch.rand(tokens, experts, device=where).topk(choices, dim=-1)
    return x, chosen, probs


@SHAPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kept", [1.0, 0.7])
def test_round_trip_equals_float64(shape, dtype, kept):
    x, chosen, probs = case(shape, dtype)
    num_rows = int(chosen.numel() * kept)
    grad = torch.randn(x.shape, device=x.device).to(dtype)

    def run(x, probs, scale):
        x, probs = (t.detach().clone().requires_grad_() for t in (x, probs))
        rows, row_ids = moe_token_permute(x, chosen, num_rows)
        out = moe_token_unpermute(rows * scale, row_ids, probs)
        return [
            rows.detach(),
            out.detach(),
            *torch.autograd.grad(out, [x, probs], grad.to(x.dtype)),
        ]

    first, second = (run(x, probs, 2) for _ in range(2))
    exact = run(x.double(), probs.double(), 2)
    order = chosen.reshape(-1).argsort(stable=True) // chosen.shape[1]
    assert torch.equal(first[0], x[order][:num_rows])
    # Rows are rounded once on the way (times 2 is exact), and each sum once.
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for got, again, truth in zip(first, second, exact):
        assert torch.equal(got, again)
        assert (got.double() - truth).norm() <= bound * truth.norm() + 1e-12


@SHAPES
@pytest.mark.parametrize("spare", [0, 3])
def test_masks_take_the_same_way(shape, spare):
    x, chosen, probs = case(shape, torch.bfloat16)
    mask = torch.zeros(shape[0], shape[3], dtype=torch.bool, device=x.device)
    mask.scatter_(1, chosen, True)
    weights = torch.zeros(shape[0], shape[3], device=x.device).scatter(1, chosen, probs)
    weights.requires_grad_()
    leaf = x.clone().requires_grad_()
    count = chosen.numel() + spare
    rows, row_weights, row_id_map = moe_permute_with_probs(leaf, weights, mask, count)
    expected = mask.t().nonzero()
    assert torch.equal(rows[: chosen.numel()], x[expected[:, 1]])
    assert torch.equal(row_weights[: chosen.numel()], weights[expected[:, 1], expected[:, 0]])
    assert not rows[chosen.numel() :].any()
    back = moe_unpermute(rows, row_id_map, weights, x.shape)
    truth = x.double() * probs.double().sum(-1, keepdim=True)
    assert (back.double() - truth).norm() <= 8e-3 * truth.norm()
    back.backward(torch.ones_like(back))
    assert torch.isfinite(leaf.grad).all() and torch.isfinite(weights.grad).all()


def test_only_the_results_are_allocated():
    current = device.current()
    x, chosen, probs = case((4096, 2048, 8, 64), torch.bfloat16)
    rows, row_ids = moe_token_permute(x, chosen)
    row_ids = row_ids.view(chosen.shape)
    for run, result in (
        (lambda: spread_rows(x, row_ids, chosen.numel()), rows),
        (lambda: gather_rows(rows, row_ids, probs), x),
    ):
        run()
        before = current.memory_allocated()
        current.reset_peak_memory()
        out = run()
        assert out.shape == result.shape
        assert current.max_memory_allocated() - before == result.nbytes
        del out


def test_kernels_equal_the_reference_bit_for_bit_where_nothing_is_summed():
    x, chosen, _ = case((100, 300, 4, 9), torch.bfloat16)
    rows, row_ids = moe_token_permute(x, chosen)
    plain = reference.spread_rows(x, row_ids.view(chosen.shape), chosen.numel())
    assert torch.equal(rows, plain)


@pytest.mark.parametrize("shape", [(4096, 64), (333, 10), (1, 1), (70, 300)], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.6, 1.2, None])
def test_numbers_of_rows_equal_the_reference(shape, share):
    torch.manual_seed(1)
    mask = torch.rand(shape, device=device.current().torch_device) < 0.2
    rows = None if share is None else int(mask.sum().item() * share)
    (got, bounds), (want, expected_bounds) = (
        run(mask, rows) for run in (routing_rows, routing.routing_rows)
    )
    count = want.starts[-1]
    assert torch.equal(bounds, expected_bounds)
    assert torch.equal(got.starts, want.starts)
    assert torch.equal(got.pair_of_row, want.pair_of_row)
    assert torch.equal(got.rows[:count], want.rows[:count])
    assert torch.equal(got.pairs, want.pairs)
