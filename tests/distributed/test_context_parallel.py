"""Attention over a split sequence equals one rank's, for any documents, heads and algorithm."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from mindspeed.distributed import collectives
from mindspeed.parallel.context import merge
from mindspeed.parallel.context.attention import (
    ContextParallel,
    context_attention,
    largest_scores,
)
from mindspeed.parallel.context.blocks import CAUSAL, FULL, Spans
from mindspeed.parallel.context.layout import Layout
from mindspeed.parallel.context.rule import Rule
from mindspeed.parallel.context.whole_documents import whole_documents
from tests.budget import examples
from tests.ranks import run_ranks

SCALE, HEAD = 0.37, 6
# (cp_comm_type, window) by the number of ranks.
ALGORITHMS = {
    2: [("p2p", 1), ("a2a", 1)],
    3: [("p2p", 1), ("a2a", 1), ("all_gather", 1)],
    4: [("p2p", 1), ("p2p", 2), ("a2a", 1), ("all_gather", 1), ("a2a+p2p", 1)],
}
if examples(1) > 100:  # the deep profile
    ALGORITHMS[8] = [("p2p", 1), ("p2p", 2), ("p2p", 4), ("a2a", 1), ("all_gather", 1)]
    ALGORITHMS[8] += [("a2a+p2p", 1), ("a2a+p2p", 2)]
    ALGORITHMS[6] = [("p2p", 1), ("p2p", 2), ("p2p", 3), ("a2a+p2p", 1)]


def context(comm_type, size, window=1):
    """Make the groups of Megatron: for a2a+p2p, neighbours exchange heads in pairs."""
    if comm_type != "a2a+p2p":
        return ContextParallel.of(comm_type, dist.group.WORLD, window)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    rings = [dist.new_group(list(range(first, size, 2))) for first in (0, 1)]
    rank = dist.get_rank()
    return ContextParallel.of(comm_type, [pairs[rank // 2], rings[rank % 2]], window)


class Case:
    """One drawn attention: documents with padding or a batch, heads, window, bias."""

    def __init__(self, seed, size):
        draw = random.Random(seed)
        self.heads, self.groups = draw.choice([(4, 1), (4, 2), (4, 4), (6, 3), (6, 2), (1, 1)])
        self.batch, self.value_size = draw.choice([1, 2]), draw.choice([HEAD, 4])
        self.window = draw.choice([FULL, CAUSAL, CAUSAL, (3, 0), (2, 2), (9, 0), (11, 3)])
        if draw.random() < 0.6:
            self.batch = 1
            lengths = [
                draw.choice([0, 1, 2, 3, 5, 7, 8, 16, 23]) for _ in range(draw.randint(1, 5))
            ]
            padded = [n + draw.choice([0, 0, 3]) for n in lengths]
            bounds, padded = ([0, *itertools.accumulate(n)] for n in (lengths, padded))
            make_layout = draw.choice([Layout.zigzag_documents, whole_documents])
            self.spans, self.layout = Spans.packed(bounds, padded), make_layout(padded, size)
            self.length = padded[-1]
        else:
            self.length = draw.choice([6 * size, 17, 1, size, 29])
            self.spans, self.layout = Spans.whole(self.length), Layout.zigzag(self.length, size)
        self.has_bias, self.has_slopes = draw.random() < 0.25, draw.random() < 0.25
        self.bias_shape = draw.choice([1, self.batch]), draw.choice([1, self.heads])
        self.generator = torch.Generator().manual_seed(seed)

    def tensors(self, dtype):
        """Draw full q, k, v, gradient, bias and slopes; padding is NaN."""
        rows, batch = self.length, self.batch
        shapes = [(self.heads, HEAD), (self.groups, HEAD), (self.groups, self.value_size)]
        drawn = [self._draw(rows, batch, *shape, dtype=dtype) for shape in shapes]
        drawn.append(self._draw(rows, batch, self.heads, self.value_size, dtype=dtype))
        real = torch.zeros(rows, dtype=torch.bool)
        for start, end in self.spans.ranges:
            real[start:end] = True
        for x in drawn:
            x[~real] = float("nan")
        bias = self._draw(*self.bias_shape, rows, rows, dtype=dtype) if self.has_bias else None
        slopes = self._draw(self.heads, dtype=dtype).abs() if self.has_slopes else None
        return *drawn, bias, slopes

    def _draw(self, *shape, dtype):
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator).to(dtype)


def one_rank(case, q, k, v, grad, bias, slopes):
    """Compute in one piece, with a dense mask; NaN of padding taken out first."""
    q, k, v = (x.nan_to_num(0).requires_grad_() for x in (q, k, v))
    bias = bias if bias is None else bias.clone().requires_grad_()
    document = torch.full((case.length,), -1)
    for number, (start, end) in enumerate(case.spans.ranges):
        document[start:end] = number
    distance = torch.arange(case.length) - torch.arange(case.length).unsqueeze(1)
    visible = (document == document.unsqueeze(1)) & (document >= 0)
    left, right = case.window
    visible &= (distance >= -left) | (left < 0)
    visible &= (distance <= right) | (right < 0)
    repeats = case.heads // case.groups
    scores = torch.einsum("sbnh,tbnh->bnst", q, k.repeat_interleave(repeats, 2)) * SCALE
    scores = scores if bias is None else scores + bias
    if slopes is not None:
        scores = scores - slopes.view(1, -1, 1, 1) * distance.abs()
    scores = scores.masked_fill(~visible, float("-inf"))
    blind = ~visible.any(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    out = torch.einsum("bnst,tbnh->sbnh", weights, v.repeat_interleave(repeats, 2))
    out.backward(grad.nan_to_num(0))
    grads = [x.grad for x in (q, k, v)] + ([] if bias is None else [bias.grad])
    return [out.detach(), *grads], scores.detach().amax((0, 2, 3))


def split(case, split_over, q, k, v, grad, bias, slopes):
    layout, rank = case.layout, split_over.rank
    q, k, v, grad = (layout.shard(x, rank) for x in (q, k, v, grad))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    if bias is not None:
        inputs.append(layout.shard(bias, rank, 2).requires_grad_())
    mine = inputs[3] if bias is not None else None
    rule = Rule(case.spans, case.window, SCALE, bias=mine, slopes=slopes)
    out = context_attention(*inputs[:3], split_over, layout, rule)
    out.backward(grad)
    largest = largest_scores(q, k, split_over, layout, rule)
    return [out.detach(), *(x.grad for x in inputs)], largest


def compare(comm_type, size, window, seeds, dtype):
    """Return the largest relative error (norm) over all cases, tensors and this rank's rows."""
    split_over, worst = context(comm_type, size, window), 0.0
    assert split_over.rank == dist.get_rank() and split_over.size == size
    for seed in seeds:
        case = Case(seed, size)
        tensors = case.tensors(dtype)
        want, largest = one_rank(case, *tensors)
        got, got_largest = split(case, split_over, *tensors)
        if torch.isfinite(largest).all():
            torch.testing.assert_close(got_largest, largest.float(), rtol=1e-5, atol=1e-6)
        for number, (one, whole) in enumerate(zip(got, want, strict=True)):
            mine = case.layout.shard(whole, split_over.rank, 2 if number == 4 else 0)
            # Gradients of one key alone are zero: then measured against the values.
            size_of = max(float(whole.norm()), float(want[0].norm()), 1e-300)
            worst = max(worst, float((one - mine).norm()) / size_of)
            assert not one.isnan().any()
    return worst


def compare_each(algorithms, size, num_cases):
    """Return the largest errors of each algorithm in float64, and in float32 on fewer cases."""
    return [
        (
            compare(comm_type, size, window, range(num_cases), torch.float64),
            compare(comm_type, size, window, range(-(-num_cases // 4)), torch.float32),
        )
        for comm_type, window in algorithms
    ]


@pytest.mark.parametrize("size", ALGORITHMS)
def test_split_attention_equals_one_rank(size):
    num_cases = examples(0.5)
    found = run_ranks(compare_each, size, ALGORITHMS[size], size, num_cases, timeout=500)
    for algorithm, errors in zip(ALGORITHMS[size], zip(*found), strict=True):
        exact, single = map(max, zip(*errors))
        print(f"{size} ranks, {algorithm}: float64 {exact:.1e}, float32 {single:.1e}")
        assert exact < 1e-12 and single < 1e-6, algorithm


class Traffic:
    """Counts messages and bytes that this rank sends, by kind, while it is entered."""

    KINDS = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")

    def __init__(self):
        self.sent = {}

    def __enter__(self):
        self._saved = {name: getattr(dist, name) for name in (*self.KINDS, "batch_isend_irecv")}
        for name, original in self._saved.items():
            setattr(dist, name, self._counting(name, original))
        return self

    def __exit__(self, *_):
        for name, original in self._saved.items():
            setattr(dist, name, original)

    def _counting(self, name, original):
        def call(*arguments, **options):
            if name == "batch_isend_irecv":
                for one in arguments[0]:
                    if one.op is dist.isend:
                        self._count("isend", one.tensor)
            else:
                self._count(name, arguments[1])
            return original(*arguments, **options)

        return call

    def _count(self, name, tensor):
        count, size = self.sent.get(name, (0, 0))
        self.sent[name] = count + 1, size + tensor.numel() * tensor.element_size()


def traffic(comm_type, size, window, layout, spans):
    """Return what one layer sends in forward and in backward, in float32, and what a row has."""
    batch, heads, groups = 2, 8, 4
    split_over = context(comm_type, size, window)
    rule = Rule(spans, CAUSAL, SCALE)
    rows = layout.num_rows(split_over.rank)
    q, k, v = (
        torch.randn(rows, batch, n, HEAD, requires_grad=True) for n in (heads, groups, groups)
    )
    with Traffic() as forward:
        out = context_attention(q, k, v, split_over, layout, rule)
    with Traffic() as backward:
        out.sum().backward()
    return forward.sent, backward.sent, batch * HEAD * 4


def traffic_of_each(cases, layout, spans):
    return [traffic(comm_type, 4, window, layout, spans) for comm_type, window in cases]


RINGS = [("p2p", 1), ("p2p", 2)]


def test_traffic():
    cases = [*RINGS, ("a2a", 1), ("all_gather", 1), ("a2a+p2p", 1)]
    layout, rows = Layout.zigzag(16, 4), 4
    for found in run_ranks(traffic_of_each, 4, cases, layout, Spans.whole(16)):
        *rings, exchanged, gathered, hybrid = found
        for forward, backward, unit in rings:
            block = rows * unit * (4 + 4)  # the key and value heads
            assert forward == {"isend": (3, 3 * block)}
            assert backward == {"isend": (3 + 4, (3 + 4) * block)}  # the gradients go home, too
        forward, backward, unit = exchanged
        # All of it, one part to the rank itself.
        there, back = rows * unit * (8 + 4 + 4), rows * unit * 8
        assert forward == backward == {"all_to_all_single": (2, there + back)}
        block = rows * unit * (4 + 4)
        forward, backward, _ = gathered
        assert forward == {"all_gather_into_tensor": (1, block)}
        assert backward == forward | {"reduce_scatter_tensor": (1, 4 * block)}
        # Twice the rows and half of the heads go round a ring of two.
        forward, backward, _ = hybrid
        heads = {"all_to_all_single": (2, there + back)}
        assert forward == heads | {"isend": (1, block)}
        assert backward == heads | {"isend": (1 + 2, 3 * block)}


def traffic_of_documents(cases, all_bounds):
    return [
        traffic_of_each(cases, whole_documents(bounds, 4), Spans.packed(bounds))
        for bounds in all_bounds
    ]


def test_documents_that_a_rank_holds_alone_do_not_travel():
    """A document for each rank sends nothing; beside one for all ranks, only that one travels."""
    apart, shared = [0, 10, 20, 30, 40], [0, 12, 18, 24, 30, 36]
    cases = [*RINGS, ("all_gather", 1)]
    for of_apart, of_shared in run_ranks(traffic_of_documents, 4, cases, [apart, shared]):
        assert all(sent == {} for *both, _ in of_apart for sent in both)
        *rings, (forward, backward, unit) = of_shared
        block = 3 * unit * (4 + 4)  # a quarter of the document
        assert forward == {"all_gather_into_tensor": (1, block)}
        assert backward == forward | {"reduce_scatter_tensor": (1, 4 * block)}
        for forward, backward, _ in rings:
            assert forward == {"isend": (3, 3 * block)}
            assert backward == {"isend": (3 + 4, (3 + 4) * block)}


def order_of_events(size):
    """Return when a rank sends, waits and attends, in forward and in backward."""
    events, wait = [], collectives.Pending.wait

    def recording(name, original):
        def call(*arguments, **options):
            events.append(name)
            return original(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", recording("send", dist.batch_isend_irecv))
        patch.setattr(collectives.Pending, "wait", recording("wait", wait))
        for name in ("partial_attention", "partial_attention_backward"):
            patch.setattr(merge, name, recording("attend", getattr(merge, name)))
        traffic("p2p", size, 1, Layout.zigzag(4 * size, size), Spans.whole(4 * size))
    return events


def test_keys_travel_while_a_rank_attends():
    """What the next step needs is sent before a step is computed, and waited for after it."""
    forward = ["send", "attend", "wait", "send", "attend", "wait", "attend"]
    # Gradients are sent when they are there, and waited for when they are added to.
    backward = ["send", "attend", "send", "wait", "send", "attend", "wait", "send"]
    backward += ["wait", "attend", "wait", "send", "wait"]
    for events in run_ranks(order_of_events, 3, 3):
        assert events == forward + backward
