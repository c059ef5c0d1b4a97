"""What a rank of a ring launches and copies: one attention a step, one merge less, few copies."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.played_ring import PlayedGather, PlayedRing
from mindspeed.parallel.context import merge
from mindspeed.parallel.context.blocks import CAUSAL, FULL, Spans, plan
from mindspeed.parallel.context.layout import Layout
from mindspeed.parallel.context.rule import Rule
from mindspeed.parallel.context.whole_documents import whole_documents

HEADS, GROUPS, HEAD, SIZE = 4, 2, 8, 4
BOUNDS = {"one document": [0, 64], "packed": [0, 16, 48, 64]}
COUNTED = ("partial_attention", "partial_attention_backward", "merge_attention", "add_rows")
VIEWS = "detach view _unsafe_view split slice select transpose permute squeeze unsqueeze expand"
VIEWS = {*VIEWS.split(), "t", "alias", "empty", "empty_like", "new_empty", "split_with_sizes"}


class Counter(TorchDispatchMode):
    """Counts operators of ours by name, and what other operators write, in bytes by name."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.calls, self.written, self._inside = dict.fromkeys(COUNTED, 0), {}, False
        for name in COUNTED:
            monkeypatch.setattr(merge, name, self._counting(name, getattr(merge, name)))

    def _counting(self, name, original):
        def call(*arguments, **options):
            self.calls[name] += 1
            self._inside = True
            found = original(*arguments, **options)
            self._inside = False
            return found

        return call

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found, name = function(*arguments, **(options or {})), function.overloadpacket.__name__
        if not self._inside and name not in VIEWS and isinstance(found, torch.Tensor):
            size = found.numel() * found.element_size()
            self.written[name] = self.written.get(name, 0) + size
        return found


def make(bounds):
    """Return a played ring of bfloat16 blocks, the queries and gradients of each rank, the rule."""
    torch.manual_seed(0)
    layout = Layout.zigzag_documents(bounds, SIZE)
    q, k, v, grad = (
        torch.randn(bounds[-1], 1, n, HEAD).bfloat16() for n in (HEADS, GROUPS, GROUPS, HEADS)
    )
    blocks = [[layout.shard(x, rank) for x in (k, v)] for rank in range(SIZE)]
    shards = [[layout.shard(x, rank) for x in (q, grad)] for rank in range(SIZE)]
    return PlayedRing(layout, blocks), shards, Rule(Spans.packed(bounds), CAUSAL, 0.3)


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("name", BOUNDS)
def test_forward(name, rank, monkeypatch):
    ring, shards, rule = make(BOUNDS[name])
    q, rows = shards[rank][0], ring.layout.num_rows(rank)
    ring.attend(q, rank, rule)  # indices and lengths are made once, for all layers
    with Counter(monkeypatch) as counter:
        ring.attend(q, rank, rule)
    assert counter.calls["partial_attention"] == SIZE
    assert counter.calls["merge_attention"] == SIZE - 1
    query, key = rows * HEADS * HEAD * 2, rows * GROUPS * HEAD * 2  # bytes
    # The result becomes bfloat16: no other copy of outputs, but where the second part has only
    # half of the queries, as that of the first rank: then the first one becomes float32.
    want = {"_to_copy": query + (rank == 0) * 2 * query}
    if name == "packed":
        # Keys of earlier ranks: the first half of each document. Queries of the second halves
        # attend to all later ranks, and are gathered once.
        want["index_select"] = rank * (2 * key // 2) + (rank < SIZE - 1) * query // 2
    assert counter.written == {op: size for op, size in want.items() if size}


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("name", BOUNDS)
def test_backward(name, rank, monkeypatch):
    ring, shards, rule = make(BOUNDS[name])
    for other in range(SIZE):  # all sums exist: this rank adds to what others have sent
        q, grad = shards[other]
        ring.attend(q.requires_grad_(), other, rule).backward(grad)
    q, grad = shards[rank]
    rows = ring.layout.num_rows(rank)
    out = ring.attend(q, rank, rule)
    q.grad, ring.totals[rank] = None, None  # the rank's own keys come first: nothing was sent
    with Counter(monkeypatch) as counter:
        out.backward(grad)
    assert counter.calls["partial_attention_backward"] == SIZE
    # Queries after the first step, and two tensors of keys and values.
    assert counter.calls["add_rows"] == 3 * (SIZE - 1)
    query, key = rows * HEADS * HEAD * 2, rows * GROUPS * HEAD * 2
    # The gradients of its own keys become float32, and the sums bfloat16; queries as in forward.
    want = {"copy_": 2 * (2 * key + (rank == 0) * query), "_to_copy": query + 2 * key}
    if name == "packed":
        statistic = rows * HEADS * 4
        halves = (3 * query + statistic) // 2 * (rank < SIZE - 1)
        want["index_select"] = rank * (2 * key // 2) + halves
    assert counter.written == {op: size for op, size in want.items() if size}


@pytest.mark.parametrize("rank", range(SIZE))
def test_gathered_keys_leave_nothing_to_merge(rank, monkeypatch):
    """Every query is in one call: its output and gradient are written where they belong."""
    ring, shards, rule = make(BOUNDS["packed"])
    q, grad = shards[rank]
    want = ring.attend(q.requires_grad_(), rank, rule)
    want.backward(grad)
    want, grad_q, q.grad = want.detach().double(), q.grad.double(), None
    gathered = PlayedGather(ring.layout, ring.blocks)
    with Counter(monkeypatch) as counter:
        out = gathered.attend(q, rank, rule)
        out.backward(grad)
    calls = 1 if rank == SIZE - 1 else 2  # the pieces of the last rank follow each other
    want_calls = dict.fromkeys(("partial_attention", "partial_attention_backward"), calls)
    # Keys and values, which both calls read.
    assert counter.calls == want_calls | {"merge_attention": 0, "add_rows": 2 * (calls - 1)}
    for got, exact in ((out.detach(), want), (q.grad, grad_q)):
        assert float((got.double() - exact).norm() / exact.norm()) < 1e-2


def test_the_played_ring_is_one_attention():
    for bounds in BOUNDS.values():
        ring, shards, rule = make(bounds)
        outs = []
        for rank, (q, grad) in enumerate(shards):
            outs.append(ring.attend(q.requires_grad_(), rank, rule))
            outs[-1].backward(grad)
        whole = Layout.zigzag_documents(bounds, 1)
        parts = [*zip(*shards), *zip(*ring.blocks)]
        q, grad, k, v = (ring.layout.unshard(torch.cat(part).detach()).double() for part in parts)
        one = PlayedRing(whole, [[k, v]])
        want = one.attend(q.requires_grad_(), 0, rule)
        want.backward(grad)
        keys = zip(*(ring.gradients(rank) for rank in range(SIZE)))
        got = [outs, [q.grad for q, _ in shards], *keys]
        for parts, exact in zip(got, [want, q.grad, *one.gradients(0)]):
            found = ring.layout.unshard(torch.cat(list(parts))).double()
            assert float((found - exact).norm() / exact.norm()) < 1e-2


WINDOWS = st.tuples(st.integers(0, 24), st.integers(0, 4)) | st.sampled_from([FULL, CAUSAL])


MAKE_LAYOUT = st.sampled_from([Layout.zigzag_documents, whole_documents])


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(2, 4), WINDOWS, MAKE_LAYOUT
)
@example([15, 11, 23], 2, (18, 0), Layout.zigzag_documents)  # a call with rows new in part
@example([55], 4, (19, 2), Layout.zigzag_documents)
def test_any_window_over_any_documents(lengths, size, window, make_layout):
    """Parts overlap in any way: what is written, merged and added makes the whole, in float64."""
    torch.manual_seed(0)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    layout = make_layout(bounds, size)
    q, k, v, grad = (torch.randn(bounds[-1], 1, n, HEAD, dtype=torch.float64) for n in (2, 1, 1, 2))
    rule, q_whole = Rule(Spans.packed(bounds), window, 0.3), q.clone().requires_grad_()
    one = PlayedRing(Layout.zigzag_documents(bounds, 1), [[k, v]])
    want = one.attend(q_whole, 0, rule)
    want.backward(grad)
    blocks = [[layout.shard(x, rank) for x in (k, v)] for rank in range(size)]
    for played in (PlayedRing(layout, blocks), PlayedGather(layout, blocks)):
        found = []
        for rank in range(size):
            mine = layout.shard(q, rank).requires_grad_()
            out = played.attend(mine, rank, rule)
            out.backward(layout.shard(grad, rank))
            found.append((out.detach(), mine.grad))
        exact = [want.detach(), q_whole.grad]
        if not isinstance(played, PlayedGather):  # there the network sums over the ranks
            found = [(*one, *played.gradients(rank)) for rank, one in enumerate(found)]
            exact += one.gradients(0)
        for parts, whole in zip(zip(*found), exact):
            torch.testing.assert_close(layout.unshard(torch.cat(parts)), whole, rtol=0, atol=1e-12)


def split_whole(bounds, size):
    """Split a row of documents as one sequence."""
    return Layout.zigzag(bounds[-1], size)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 8),
    MAKE_LAYOUT | st.just(split_whole),
)
def test_causal_documents_are_one_call_a_step(lengths, size, make_layout):
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    layout = make_layout(bounds, size)
    for mine in layout.ranges:
        for theirs in layout.ranges:
            assert len(plan(Spans.packed(bounds), mine, theirs, CAUSAL)) <= 1


def test_a_step_of_a_long_sequence_is_the_largest_call():
    size, length = 8, 8 * 32
    layout, work = Layout.zigzag(length, size), []
    for rank, mine in enumerate(layout.ranges):
        for source, theirs in enumerate(layout.ranges):
            (call,) = plan(Spans.whole(length), mine, theirs, CAUSAL)
            (q,), (k,) = call.q, call.k
            work.append((q[1] - q[0]) * (k[1] - k[0]))
            # Both halves of the queries to one half of earlier keys; the later half to both.
            assert q == ((0, 32) if source <= rank else (16, 32))
            assert k == ((0, 32) if source >= rank else (0, 16))
    causal = size * 32 * 32 / 2  # half of each own block is computed
    assert math.isclose(sum(work) - causal, length * length / 2)
