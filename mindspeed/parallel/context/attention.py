"""Attention over a sequence that is split over ranks: one function, four algorithms.

S rows of this rank, B batch, N query heads, K key / value heads, H head size (V of values).

Example, packed documents on every rank of `cp_group`:

    layout = Layout.zigzag_documents(padded_bounds, cp_group.size())
    q, k, v = (layout.shard(x, cp_group.rank()) for x in (full_q, full_k, full_v))
    rule = Rule(Spans.packed(bounds, padded_bounds), CAUSAL, scale=H**-0.5)
    out = context_attention(q, k, v, ContextParallel.of("p2p", cp_group), layout, rule)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from mindspeed.distributed.collectives import group_rank, group_size
from mindspeed.distributed.context_rules import check_comm_type, check_window
from mindspeed.parallel.context.all_gather import Gather, gather_rows
from mindspeed.parallel.context.blocks import Spans
from mindspeed.parallel.context.exchange import Exchange, Members, attention_over
from mindspeed.parallel.context.layout import Layout
from mindspeed.parallel.context.ring import Ring
from mindspeed.parallel.context.rule import Rule
from mindspeed.parallel.context.ulysses import HeadSplit, to_heads, to_rows


@dataclass(frozen=True)
class ContextParallel:
    """The groups over which a sequence is split, and what travels over them.

    Heads are exchanged over `a2a_group`, whose ranks are neighbours; keys and values travel round
    `ring_group`, or are gathered over `gather_group`. A group that is None has one rank.
    """

    a2a_group: ProcessGroup | None = None
    ring_group: ProcessGroup | None = None
    gather_group: ProcessGroup | None = None
    window: int = 1
    """Ranks of an inner ring (double ring); 1 for one ring."""

    @classmethod
    def of(
        cls,
        comm_type: str | None,
        group: ProcessGroup | list[ProcessGroup] | None,
        window: int = 1,
    ) -> ContextParallel:
        """Read what Megatron passes: a cp_comm_type and one group, or two for a2a+p2p."""
        comm_type = "p2p" if comm_type is None else comm_type
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
        check_comm_type(comm_type, len(groups))
        if comm_type == "a2a+p2p":
            context = cls(a2a_group=groups[0], ring_group=groups[1], window=window)
        elif comm_type == "a2a":
            context = cls(a2a_group=groups[0])
        elif comm_type == "all_gather":
            context = cls(gather_group=groups[0])
        else:
            context = cls(ring_group=groups[0], window=window)
        check_window(context.window, group_size(context.ring_group))
        return context

    @property
    def size(self) -> int:
        """The number of ranks over which a sequence is split."""
        groups = self.a2a_group, self.ring_group, self.gather_group
        return group_size(groups[0]) * group_size(groups[1]) * group_size(groups[2])

    @property
    def rank(self) -> int:
        """This rank's number in the layout: neighbours exchange heads."""
        if self.gather_group is not None:
            return self.gather_group.rank()
        inner = group_size(self.a2a_group)
        return group_rank(self.ring_group) * inner + group_rank(self.a2a_group)

    def exchange(self, layout: Layout, spans: Spans) -> Exchange:
        """Return how keys and values travel between ranks that hold these rows of documents."""
        if self.gather_group is not None:
            return Gather(self.gather_group, layout, spans)
        return Ring(self.ring_group, layout, spans, self.window)


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, context: ContextParallel, layout: Layout, rule: Rule
) -> Tensor:
    """Return (S, B, N, V): this rank's rows of the attention over all ranks.

    Args:
        q: (S, B, N, H); k: (S, B, K, H); v: (S, B, K, V); the rows are `layout.ranges` of the rank.
            More rows than that are padding at the end.
        rule: the documents, which keys a query of a document sees, and how they are scored.
    """
    rows = layout.num_rows(context.rank)
    padding = q.shape[0] - rows
    if padding < 0:
        raise ValueError(f"this rank holds {q.shape[0]} rows, its layout says {rows}")
    rule = rule.of_rows(rows, q.shape[0])
    if padding:
        q, k, v = q[:rows], k[:rows], v[:rows]
    if group_size(context.a2a_group) > 1:
        out = _with_heads_exchanged(q, k, v, context, layout, rule)
    else:
        out = attention_over(q, k, v, context.exchange(layout, rule.spans), rule)
    return pad(out, (0, 0) * 3 + (0, padding)) if padding else out


def _with_heads_exchanged(
    q: Tensor, k: Tensor, v: Tensor, context: ContextParallel, layout: Layout, rule: Rule
) -> Tensor:
    group, bias, slopes = context.a2a_group, rule.bias, rule.slopes
    assert group is not None
    size, rank = group.size(), group.rank()
    first = context.rank - rank
    members = Members(group, Layout(layout.ranges[first : first + size]))
    heads = HeadSplit.of(q.shape[2], k.shape[2], size)
    tensors, splits = [q, k, v], [heads.q, heads.k, heads.k]
    if bias is not None:  # its rows and heads are those of the queries
        tensors.append(bias.expand(q.shape[1], q.shape[2], -1, -1).permute(2, 0, 1, 3))
        splits.append(heads.q)
    q, k, v, *others = to_heads(tensors, splits, members)
    if bias is not None:
        bias = others[0].permute(1, 2, 0, 3)
    if slopes is not None:
        slopes = slopes[slice(*heads.q[rank])]
    k, v = (heads.per_query_group(x, rank) for x in (k, v))
    exchange = context.exchange(layout.merge(size), rule.spans)
    rule = replace(rule, bias=bias, slopes=slopes)
    return to_rows(attention_over(q, k, v, exchange, rule), heads.q, members)


@torch.no_grad()
def largest_scores(
    q: Tensor, k: Tensor, context: ContextParallel, layout: Layout, rule: Rule
) -> Tensor:
    """Return the largest score of each head (N,) over all ranks, for the inputs of the attention.

    Kernels do not return it: all keys are gathered, and the scores computed once more.
    """
    ranges, place = layout.ranges[context.rank], context.rank
    rows = layout.num_rows(context.rank)
    rule = rule.of_rows(rows, q.shape[0])
    q, k = q[:rows], k[:rows]
    groups = [
        group
        for group in (context.a2a_group, context.ring_group, context.gather_group)
        if group is not None
    ]
    for group in groups:  # from neighbours outwards
        place = place // group.size()
        first = place * group.size()
        members = Members(group, Layout(layout.ranges[first : first + group.size()]))
        k = members.layout.unshard(gather_rows([k], members)[0])
        layout = layout.merge(group.size())
    largest = rule.largest(q, k, rule.calls(ranges, layout.covered, q))
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest
