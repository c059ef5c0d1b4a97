"""Experts on gathered tokens equal a loop over experts, and keep tokens and pre-activation only.

The kernels of quack-kernels are stood in for by plain torch.
"""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from mindspeed.device import hopper
from mindspeed.ops.expert_mlp import quack_impl
from mindspeed.ops.expert_mlp.reference import Reference, number_rows, sorted_rows
from mindspeed.parallel.tensor import DeferredGradients
from mindspeed.parallel.tensor import expert_mlp as expert_mlp_module
from mindspeed.parallel.tensor.expert_mlp import ExpertMatrices, expert_mlp
from tests.budget import examples
from tests.unit.ops import kernel_files, quack_stand_in

HIDDEN, COLUMNS = 16, 8
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(params=["reference", "quack", "quack of copied rows"])
def kernels(request, monkeypatch):
    """Run both sets of kernels; those of the package take float64 and small sizes here."""
    quack_impl._passes_trial.cache_clear()
    quack_impl._tiles.cache_clear()
    name = request.param.split()[0]
    monkeypatch.setattr(quack_impl, "MIN_COPIED_COLUMNS", 0 if "copied" in request.param else 99)
    if name == "quack":
        quack_stand_in.install(monkeypatch)
        monkeypatch.setattr(quack_impl, "DTYPES", (torch.float64,))
        monkeypatch.setattr(quack_impl, "MIN_ROWS", 1)
        monkeypatch.setattr(quack_impl, "ALIGN_ELEMENTS", 8)
        monkeypatch.setattr(quack_impl, "_passes_trial", lambda *_: True)
    yield name
    quack_impl._tiles.cache_clear()


def draw(routing_map, dtype=torch.float64):
    torch.manual_seed(3)
    num_tokens, num_experts = routing_map.shape
    x = torch.randn(num_tokens, HIDDEN, dtype=dtype)
    first = torch.randn(num_experts, 2 * COLUMNS, HIDDEN, dtype=dtype) / 4
    second = torch.randn(num_experts, HIDDEN, COLUMNS, dtype=dtype) / 4
    probs = torch.rand(num_tokens, num_experts, dtype=dtype) * routing_map
    return [one.requires_grad_() for one in (x, probs, first, second)]


def ours(x, probs, first, second, routing_map):
    rows, pairs = number_rows(routing_map, int(routing_map.sum()))
    weights = probs.reshape(-1).index_select(0, pairs)
    return expert_mlp(x, weights, rows, ExpertMatrices(list(first)), ExpertMatrices(list(second)))


def loop(x, probs, first, second, routing_map):
    out = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(zip(first, second)):
        tokens = routing_map[:, expert].nonzero()[:, 0]
        gate, up = (x[tokens] @ gate_up.t()).chunk(2, -1)
        rows = (silu(gate) * up) @ down.t() * probs[tokens, expert].unsqueeze(1)
        out = out.index_add(0, tokens, rows)
    return out


def outputs_and_gradients(function, given_tensors, routing_map):
    out = function(*given_tensors, routing_map)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, given_tensors, grad)]


def check(routing_map, name):
    rows, _ = number_rows(routing_map, int(routing_map.sum()))
    kernels = expert_mlp_module.choose(*draw(routing_map)[::2], rows)
    assert type(kernels).__name__.lower() == name
    found = outputs_and_gradients(ours, draw(routing_map), routing_map)
    expected = outputs_and_gradients(loop, draw(routing_map), routing_map)
    expected[2] = expected[2] * routing_map
    torch.testing.assert_close(found, expected, **EXACT)
    for expert in (routing_map.sum(0) == 0).nonzero()[:, 0].tolist():
        assert not found[3][expert].any() and not found[4][expert].any(), name
    return found


def chosen(num_tokens, num_experts, top_k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    mask = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    return mask.scatter_(1, scores.topk(top_k).indices, True)


def all_to_one(num_tokens, num_experts):
    mask = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    mask[:, 1] = True
    return mask


@pytest.mark.parametrize(
    "routing_map",
    [chosen(13, 5, 2), all_to_one(7, 4), chosen(6, 4, 4), chosen(3, 8, 1), chosen(9, 1, 1)],
    ids=["uneven", "all tokens to one expert", "k = E", "empty experts", "one expert"],
)
def test_output_and_gradients_equal_a_loop_over_experts(kernels, routing_map):
    check(routing_map, kernels)


@settings(max_examples=examples(1), deadline=None)
@given(masks=st.lists(st.integers(0, 31), min_size=1, max_size=20).filter(any))
def test_any_routing(masks):
    """Tokens may have any number of experts, none too."""
    mask = torch.tensor([[bool(bits >> expert & 1) for expert in range(5)] for bits in masks])
    with pytest.MonkeyPatch.context() as monkeypatch:
        check(mask, "reference")
        quack_stand_in.install(monkeypatch)
        monkeypatch.setattr(expert_mlp_module, "choose", lambda *_: quack_impl.Quack())
        quack_impl._tiles.cache_clear()
        check(mask, "quack")
    quack_impl._tiles.cache_clear()


def test_gradcheck(kernels):
    mask = chosen(4, 3, 2)
    assert torch.autograd.gradcheck(lambda *tensors: ours(*tensors, mask), draw(mask))


@pytest.mark.parametrize("memory", ["side by side", "reversed", "apart", "unaligned"])
@pytest.mark.parametrize("is_deferred", [False, True])
def test_weight_gradients_are_added_to_main_grad(kernels, memory, is_deferred):
    mask = chosen(13, 4, 2)
    rows, pairs = number_rows(mask, 26)
    x, probs, *matrices = draw(mask)
    deferred = DeferredGradients() if is_deferred else None
    linears = []
    for matrix in matrices:
        weights = [one.detach().clone().requires_grad_() for one in matrix]
        for weight, total in zip(weights, buffers(matrix, memory), strict=True):
            weight.main_grad = total
        linears.append(ExpertMatrices(weights, True, deferred))
    out = expert_mlp(x, probs.reshape(-1)[pairs.long()], rows, *linears)
    out.square().sum().backward()
    if deferred is not None:
        deferred.run(2)
    want = draw(mask)
    loop(*want, mask).square().sum().backward()
    for linear, matrix in zip(linears, want[2:], strict=True):
        found = torch.stack([weight.main_grad for weight in linear.weights]) - 0.5
        torch.testing.assert_close(found, matrix.grad, **EXACT)
        assert all(weight.grad is None for weight in linear.weights)


def buffers(matrix, memory):
    offset = 1 if memory == "unaligned" else 0
    flat = torch.full((matrix.numel() + offset,), 0.5, dtype=matrix.dtype)[offset:]
    totals = list(flat.view(matrix.shape))
    if memory == "reversed":
        return totals[::-1]
    return [total.clone() for total in totals] if memory == "apart" else totals


def test_no_temporary_for_gradients_that_lie_side_by_side(kernels):
    matrix = torch.zeros(4, 16, 8)
    whole = quack_impl._side_by_side(list(matrix))
    assert whole.data_ptr() == matrix.data_ptr() and whole.shape == matrix.shape
    wide = torch.zeros(4, 20, 8)[:, :16]
    assert quack_impl._side_by_side(list(wide)).stride() == wide.stride()
    assert quack_impl._side_by_side(list(matrix)[::-1]) is None
    assert quack_impl._side_by_side(list(torch.zeros(3, 3, 3))) is None
    assert quack_impl._side_by_side([torch.zeros(4, 4), torch.zeros(4, 4)]) is None


@pytest.mark.parametrize("top_k", [1, 4])
def test_only_tokens_and_preactivation_are_kept(kernels, top_k):
    mask = chosen(64, 6, top_k)
    x, probs, first, second = draw(mask)
    parameters = {first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ours(x, probs, first, second, mask)
    num_rows = 64 * top_k
    large = x.nbytes + num_rows * 2 * COLUMNS * x.itemsize
    small = sum(kept.values()) - large
    # Row numbers, weights and bounds: six int32 or int64 and one weight a row, some for each token.
    assert 0 < small <= num_rows * (6 * 8 + 8) + 64 * (6 * 8 + 8) + 64
    assert math.isclose(max(kept.values()), max(x.nbytes, large - x.nbytes))


def sorted_by_expert(num_rows):
    return sorted_rows(torch.tensor([num_rows, 0, 0, 0]), num_rows)


def test_rows_that_are_sorted_already_equal_a_loop_over_experts(kernels):
    counts = torch.tensor([5, 0, 7])
    mask = torch.repeat_interleave(torch.eye(3, dtype=torch.bool), counts, dim=0)

    def of_rows(x, probs, first, second, routing_map):
        linears = ExpertMatrices(list(first)), ExpertMatrices(list(second))
        return expert_mlp(x, probs[routing_map], sorted_rows(counts, 12), *linears)

    found = outputs_and_gradients(of_rows, draw(mask), mask)
    expected = outputs_and_gradients(loop, draw(mask), mask)
    expected[2] = expected[2] * mask
    torch.testing.assert_close(found, expected, **EXACT)


def test_the_package_is_chosen_where_it_works(monkeypatch):
    x, first = torch.empty(512, 64).bfloat16(), torch.empty(4, 128, 64).bfloat16()
    many, few = sorted_by_expert(1024), sorted_by_expert(1023)
    quack_impl._passes_trial.cache_clear()
    quack_impl.prepare.cache_clear()
    assert isinstance(quack_impl.choose(x, first, many), Reference)
    quack_impl._passes_trial.cache_clear()
    quack_stand_in.install(monkeypatch)
    quack_impl._tiles.cache_clear()
    assert isinstance(quack_impl.choose(x, first, many), quack_impl.Quack)
    for others in (
        (x.float(), first.float(), many),
        (x, first, few),
        (x[:, :56], first[..., :56], many),
        (x, first[:, :64], many),
        (x.half(), first, many),
    ):
        assert isinstance(quack_impl.choose(*others), Reference)
    quack_impl._passes_trial.cache_clear()


@pytest.mark.parametrize("is_gathered", [True, False])
@pytest.mark.parametrize("sizes", [(128, 64), (192, 192), (128, 128), (64, 512)], ids=str)
def test_every_tile_of_a_size_is_tried(monkeypatch, sizes, is_gathered):
    """Each kernel that a layer calls has been called by the trial, and by a process before it."""
    quack_stand_in.install(monkeypatch)
    quack_impl._tiles.cache_clear()
    interface, calls = sys.modules["quack.gemm_interface"], kernel_files.Calls()
    for owner, name in ((interface, "gemm_gated"), (interface, "gemm_dgated")):
        monkeypatch.setattr(owner, name, calls.noting(name, getattr(owner, name)))
    plain = interface.gemm_tuned.fn
    monkeypatch.setattr(interface.gemm_tuned, "fn", calls.noting("gemm_tuned", plain))
    tried = calls.of(lambda: quack_impl._trial(torch.bfloat16, *sizes, is_gathered))

    def run_each():
        for gemm in quack_impl.GEMMS:
            quack_impl.run_kernel(gemm, "bfloat16", *sizes, is_gathered)

    assert calls.of(run_each) == tried and len(tried) == len(quack_impl.GEMMS)
    quack_impl._tiles.cache_clear()


def test_kernels_are_compiled_beside_each_other_where_there_are_cores(monkeypatch, tmp_path):
    quack_stand_in.install(monkeypatch)
    kernel_files.keep(monkeypatch, tmp_path)
    quack_impl.prepare.cache_clear()
    quack_impl.prepare(torch.bfloat16, 128, 64, True)
    kernels = quack_impl._trial_kernels(torch.bfloat16, 128, 64, True)
    assert len(kernels) == len(quack_impl.GEMMS) == len(list(tmp_path.iterdir()))
    assert len(kernel_files.started(hopper.QUACK, kernels)) == len(kernels)
    quack_impl.prepare.cache_clear()


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_kernels_that_fail_are_not_used_and_reported_once(monkeypatch, caplog, fault):
    def bad(*args, **kwargs):
        if fault == "raises":
            raise RuntimeError("no such instruction\nat line 3")
        grad, weighted, dots = quack_stand_in.gemm_dgated(*args, **kwargs)
        return grad, weighted, dots * 1.1

    quack_stand_in.install(monkeypatch)
    monkeypatch.setattr(sys.modules["quack.gemm_interface"], "gemm_dgated", bad)
    quack_impl._passes_trial.cache_clear()
    quack_impl._tiles.cache_clear()
    x, first = torch.empty(512, 64).bfloat16(), torch.empty(4, 128, 64).bfloat16()
    for _ in range(2):
        assert isinstance(quack_impl.choose(x, first, sorted_by_expert(1024)), Reference)
    (line,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    reason = "no such instruction" if fault == "raises" else "its results are wrong"
    assert line == (
        f"quack-kernels is not used for grouped GEMMs of experts (torch.bfloat16): {reason}"
    )
    quack_impl._passes_trial.cache_clear()
    quack_impl._tiles.cache_clear()
