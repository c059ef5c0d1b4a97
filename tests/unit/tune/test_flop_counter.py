"""Operations are counted by closed forms, on every device, and recomputed ones separately."""

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mindspeed.ops import npu_gmm, npu_groupmatmul_add_fp32
from mindspeed.tune.flop_counter import (
    FORMULAS,
    FlopCounter,
    Flops,
    grouped_matmul,
    marks_recompute,
    npu_attention,
    packed_attention,
    wrap_grouped_kernel,
)

aten = torch.ops.aten


def counted(function, *args):
    with FlopCounter() as counter:
        function(*args)
    return counter.flops


def random(*shape, **options):
    return torch.randn(shape, **options)


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (torch.mm, (random(3, 5), random(5, 7)), 2 * 3 * 5 * 7),
        (torch.bmm, (random(2, 3, 5), random(2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        (torch.addmm, (random(7), random(3, 5), random(5, 7)), 2 * 3 * 5 * 7),
        (torch.baddbmm, (random(1), random(2, 3, 5), random(2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        (random(3, 7).addmm_, (random(3, 5), random(5, 7)), 2 * 3 * 5 * 7),
        (partial(torch.mm, out=random(3, 7)), (random(3, 5), random(5, 7)), 2 * 3 * 5 * 7),
        (torch.mv, (random(3, 5), random(5)), 2 * 3 * 5),
        (torch.einsum, ("abc,cd->abd", random(2, 3, 5), random(5, 7)), 2 * 2 * 3 * 5 * 7),
        (torch.nn.functional.linear, (random(4, 3, 5), random(7, 5)), 2 * 4 * 3 * 5 * 7),
        (torch.add, (random(3), random(3)), 0),
    ],
)
def test_a_matmul_is_two_mnk(function, arguments, expected):
    assert counted(function, *arguments) == Flops(expected, expected)


def test_inference_mode_hides_nothing():
    with torch.inference_mode():
        assert counted(torch.nn.Linear(5, 7), random(3, 5)).model == 2 * 3 * 5 * 7


def test_a_network_counts_as_torch_counts_it():
    network = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 4))
    x = random(3, 6, requires_grad=True)

    def step():
        network(x).sum().backward()

    with FlopCounterMode(display=False) as theirs:
        step()
    assert counted(step).model == theirs.get_total_flops() > 0


@pytest.mark.parametrize(("is_causal", "share"), [(False, 1.0), (True, 0.5)])
def test_attention_counts_the_pairs_it_computes(is_causal, share):
    """Grouped queries, and values narrower than keys as in multi-head latent attention."""
    query = random(2, 4, 6, 16, requires_grad=True)
    key, value = random(2, 4, 10, 16), random(2, 4, 10, 8)

    def forward():
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal=is_causal
        )

    pairs = 2 * 4 * 6 * 10 * share
    formula = FORMULAS["aten::_scaled_dot_product_flash_attention_for_cpu"]
    named = {"query": query, "key": key, "value": value, "is_causal": is_causal}
    assert formula(named) == 2 * pairs * (16 + 8)
    value = random(2, 4, 10, 16)  # torch's kernel wants one size
    with FlopCounter() as counter:
        out = forward()[0]
        assert counter.flops.model == 2 * pairs * (16 + 16)
        out.sum().backward()
    assert counter.flops.model == 3 * 2 * pairs * (16 + 16)


def test_attention_through_its_public_door():
    q, k, v = (random(1, 2, 8, 16, requires_grad=True) for _ in "qkv")
    flops = counted(lambda: scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward())
    assert flops.model == 3 * 4 * 2 * (8 * 8 / 2) * 16


def test_packed_attention_counts_each_sequence_for_itself():
    query, key, value = random(10, 4, 16), random(10, 2, 16), random(10, 2, 16)
    bounds = torch.tensor([0, 3, 10])
    named = {"query": query, "key": key, "value": value, "is_causal": True}
    flops = packed_attention(named | {"cum_seq_q": bounds, "cum_seq_k": bounds})
    assert flops == 4 * (3 * 3 + 7 * 7) / 2 * 4 * 16
    whole = {name: x[None] for name, x in (("query", query), ("key", key), ("value", value))}
    assert packed_attention(whole) == 4 * 10 * 10 * 4 * 16


@pytest.mark.parametrize(("keys", "pairs"), [(4, 8), (10, 32), (3, 4.5)])
def test_causal_queries_of_a_longer_document_see_all_keys_before_them(keys, pairs):
    """Four queries at the end of 10 keys: half of their own 16 pairs, and 6 keys each."""
    named = {"query": random(4, 2, 16), "key": random(keys, 2, 16), "value": random(keys, 2, 16)}
    bounds = {"cum_seq_q": torch.tensor([0, 4]), "cum_seq_k": torch.tensor([0, keys])}
    assert packed_attention(named | bounds | {"is_causal": True}) == 4 * pairs * 2 * 16


@pytest.mark.parametrize(
    ("left", "right"),
    [((12, 5), (3, 5, 7)), ((5, 12), (12, 7)), ((3, 4, 5), (3, 5, 7)), ((3, 4, 5), (5, 9))],
    ids=["rows", "inner", "batch", "columns"],
)
def test_grouped_matmul_counts_every_row_once(left, right):
    expected = {
        ((12, 5), (3, 5, 7)): 2 * 12 * 5 * 7,
        ((5, 12), (12, 7)): 2 * 5 * 12 * 7,
        ((3, 4, 5), (3, 5, 7)): 2 * 3 * 4 * 5 * 7,
        ((3, 4, 5), (5, 9)): 2 * 4 * 5 * 9,
    }[left, right]
    assert grouped_matmul({"self": random(*left), "mat2": random(*right)}) == expected


def test_our_grouped_matmuls():
    x, weight = random(12, 5, requires_grad=True), random(3, 5, 7, requires_grad=True)
    ends = torch.tensor([4, 4, 12])
    flops = counted(lambda: npu_gmm(x, weight, group_list=ends).sum().backward())
    assert flops.model == 3 * 2 * 12 * 5 * 7
    out = torch.zeros(3, 5, 7)
    flops = counted(npu_groupmatmul_add_fp32, x.detach(), random(12, 7), ends, out)
    assert flops.model == 2 * 12 * 5 * 7


def test_a_kernel_that_torch_does_not_see_is_counted_by_its_launch():
    launched = []
    launch = wrap_grouped_kernel(lambda *args: launched.append(args))
    x, dy = random(12, 5), random(12, 7)
    assert counted(launch, x, dy, None).model == 2 * 12 * 5 * 7
    launch(x, dy, None)  # outside a counter it only runs
    assert len(launched) == 2


@pytest.mark.parametrize(
    ("layout", "shape"),
    [("BSH", (2, 6, 32)), ("SBH", (6, 2, 32)), ("BNSD", (2, 4, 6, 8)), ("BSND", (2, 6, 4, 8))],
)
def test_layouts_of_the_npu_count_the_same(layout, shape):
    named = dict.fromkeys(("query", "key", "value"), random(*shape))
    named |= {"head_num": 4, "input_layout": layout}
    assert npu_attention(named) == 4 * 2 * 6 * 6 * 32
    assert npu_attention(named | {"sparse_mode": 2}) == 4 * 2 * 6 * 6 * 32 / 2


def test_packed_attention_of_the_npu():
    named = dict.fromkeys(("query", "key", "value"), random(10, 4, 8))
    named |= {"head_num": 4, "input_layout": "TND", "sparse_mode": 3}
    named |= {"actual_seq_qlen": (3, 10), "actual_seq_kvlen": (3, 10)}
    assert npu_attention(named) == 4 * (9 + 49) / 2 * 32


class Matmul(torch.autograd.Function):
    """A matmul whose forward runs without gradients, as fused linear layers do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_operations_are_counted_separately(use_reentrant):
    x, weight = random(3, 5, requires_grad=True), random(5, 5, requires_grad=True)
    matmul = 2 * 3 * 5 * 5

    def block(x):
        return torch.relu(Matmul.apply(torch.relu(x @ weight), weight))

    def step():
        y = checkpoint(marks_recompute(block), x, use_reentrant=use_reentrant)
        (y @ weight).sum().backward()

    flops = counted(step)
    assert flops.model == 3 * 3 * matmul
    assert flops.hardware - flops.model == 2 * matmul
