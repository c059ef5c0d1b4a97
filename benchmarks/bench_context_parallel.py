"""What does it cost to split attention over ranks? One process plays each rank of a ring in turn.

    python benchmarks/bench_context_parallel.py [--quick] [--tokens 32768 131072] [--ranks 4 8]

Efficiency is the time of one whole causal attention divided by the sum of what all ranks compute,
forward and backward, without communication: 1 if splitting were free. Packed documents are compared
with the same documents unsplit, in a ring and by ranks that gather all keys; every document in
pieces for all ranks (zigzag, as Megatron's data loader cuts them), or as whole as balanced ranks
allow (as the suites cut them). A profiled run shows where the time goes: attention (and that of the
unsplit run), merge of partial results, sums of gradients, copies, an idle device (the host is too
slow), and how many kernels were launched. Heads are those of an 8B model: 32 query heads, 8 key
heads of 128, bfloat16. Before anything is timed, the outputs are compared with the whole ones.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from played_ring import PlayedGather, PlayedRing
from record import record
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mindspeed import device
from mindspeed.ops.fusion_attention import sdpa
from mindspeed.parallel.context.blocks import CAUSAL, Spans
from mindspeed.parallel.context.layout import Layout
from mindspeed.parallel.context.rule import Rule
from mindspeed.parallel.context.whole_documents import whole_documents
from mindspeed.te.pytorch.attention.core import Documents, Softmax, attend_documents
from mindspeed.te.pytorch.attention.masks import MaskRule

HEADS, GROUPS, HEAD = 32, 8, 128
SCALE = HEAD**-0.5
BARS = {(131072, 4): 0.93, (131072, 8): 0.93, (32768, 4): 0.85}
PACKED_BAR, MERGE_BAR = 0.80, 0.03
CASES = (
    "causal",
    "packed",
    "packed, gathered",
    "packed, whole documents",
    "packed, whole documents, gathered",
)
# Words in the names of kernels: the attention of every backend, the merge of partial results, the
# sums of gradients. The rest are copies: gathered rows, casts, zeros.
PARTS = {
    "merge": ("merge_attention", "logaddexp"),
    "sums": ("add_rows", "add_all_rows", "index_add"),
    "attention": (
        "flash",
        "fmha",
        "cudnn",
        "cutlass",
        "attn",
        "attention",
        "sdpa",
        "bmm",
        "softmax",
        "exp",
    ),
}
TOLERANCE = 1e-2  # of bfloat16 outputs that were rounded once more


class Split:
    """A sequence of documents, and what each rank of a ring computes for it."""

    def __init__(
        self,
        bounds,
        ranks,
        where,
        heads=(HEADS, GROUPS, HEAD),
        played=PlayedRing,
        make_layout=Layout.zigzag_documents,
    ):
        num_heads, groups, head = heads
        self.played = played
        self.bounds, self.layout = bounds, make_layout(bounds, ranks)
        self.rule = Rule(Spans.packed(bounds), CAUSAL, SCALE)
        make = {"device": where, "dtype": torch.bfloat16 if where.type != "cpu" else torch.float32}
        rows = bounds[-1]
        self.whole = [torch.randn(rows, 1, n, head, **make) for n in (num_heads, groups, groups)]
        self.grad = torch.randn(rows, 1, num_heads, head, **make)
        q, *kv, grad = ([self.layout.shard(x, r) for r in range(ranks)] for x in self._tensors)
        self.shards, self.blocks = list(zip(q, grad)), [list(block) for block in zip(*kv)]

    @property
    def _tensors(self):
        return *self.whole, self.grad

    def ranks(self):
        """Run forward and backward of all ranks, and return their outputs."""
        ring, outs = self.played(self.layout, self.blocks), []
        for rank, (q, grad) in enumerate(self.shards):
            out = ring.attend(q.detach().requires_grad_(), rank, self.rule)
            out.backward(grad)
            outs.append(out.detach())
        return outs

    def unsplit(self):
        """Run forward and backward of the whole sequence, and return the output."""
        q, k, v = (x.detach().requires_grad_() for x in self.whole)
        if len(self.bounds) == 2:
            heads_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
            out = sdpa.attention(*heads_first, scale=SCALE, is_causal=True).permute(2, 0, 1, 3)
        else:
            documents = Documents.of(self._device_bounds, None)
            rule, softmax = MaskRule.of("padding_causal", None), Softmax(SCALE, 0.0)
            packed = attend_documents(
                *(x.squeeze(1) for x in (q, k, v)), rule, softmax, of_q=documents, of_k=documents
            )
            out = packed.view(self.grad.shape)
        out.backward(self.grad)
        return out.detach()

    @property
    def _device_bounds(self):
        return torch.tensor(self.bounds, dtype=torch.int32, device=self.grad.device)

    def check(self):
        """Fail if the ranks' outputs are not those of the whole."""
        got, want = self.layout.unshard(torch.cat(self.ranks())), self.unsplit()
        error = float((got.double() - want.double()).norm() / want.double().norm())
        assert error < TOLERANCE, f"relative error {error}"


def documents(tokens, seed=0):
    """Draw document lengths whose logarithms are normal, as those of long-context text are."""
    draw, bounds = random.Random(seed), [0]
    while bounds[-1] < tokens:
        length = int(min(max(draw.lognormvariate(8.3, 1.2), 256), tokens / 2))
        bounds.append(min(bounds[-1] + length, tokens))
    return bounds


def seconds(functions, repeats):
    """Return the median times of functions that take turns."""
    times = [[] for _ in functions]
    for round_ in range(repeats + 1):
        for function, found in zip(functions, times):
            device.current().synchronize()
            start = time.perf_counter()
            function()
            device.current().synchronize()
            if round_:
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def parts(function):
    """Return the milliseconds of one run by part of the step, and the number of launches.

    On an accelerator these are the times of its kernels; on a cpu those of torch's operators.
    """
    on_device = device.current().name != "cpu"
    found = dict.fromkeys((*PARTS, "copies"), 0.0)
    activities = [ProfilerActivity.CUDA] if on_device else [ProfilerActivity.CPU]
    with profile(activities=activities) as run:
        function()
        device.current().synchronize()
    launches = 0
    for event in run.events():
        if on_device and event.device_type == DeviceType.CPU:
            continue
        name, launches = event.name.lower(), launches + 1
        part = next((p for p, words in PARTS.items() if any(w in name for w in words)), "copies")
        found[part] += (event.device_time if on_device else event.self_cpu_time_total) / 1e3
    return found, launches


def measure(name, bounds, ranks, repeats, heads):
    """Return one row of the table."""
    played = PlayedGather if "gathered" in name else PlayedRing
    make_layout = whole_documents if "whole" in name else Layout.zigzag_documents
    split = Split(bounds, ranks, device.current().torch_device, heads, played, make_layout)
    split.check()
    whole, split_time = (x * 1e3 for x in seconds([split.unsplit, split.ranks], repeats))
    (alone, _), (found, launches) = parts(split.unsplit), parts(split.ranks)
    tokens = bounds[-1]
    bar = PACKED_BAR if name.startswith("packed") else BARS.get((tokens, ranks), "")
    return {
        "case": name,
        "tokens": tokens,
        "documents": len(bounds) - 1,
        "ranks": ranks,
        "whole_ms": f"{whole:.2f}",
        "ranks_ms": f"{split_time:.2f}",
        "efficiency": f"{whole / split_time:.3f}",
        "bar": bar,
        "merge_share": f"{found['merge'] / split_time:.4f}",
        "merge_bar": MERGE_BAR,
        "whole_attention_ms": f"{alone['attention']:.2f}",
        **{f"{part}_ms": f"{found[part]:.2f}" for part in found},
        "idle_ms": f"{max(0.0, split_time - sum(found.values())):.2f}",
        "launches": launches,
    }


def main():
    """Measure the bars and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--heads", type=int, nargs=3, default=[HEADS, GROUPS, HEAD])
    parser.add_argument("--quick", action="store_true", help="the bars only, three repeats")
    parser.add_argument("--no-record", action="store_true", help="write no results file")
    args = parser.parse_args()
    repeats = 3 if args.quick else args.repeats
    pairs = [(tokens, ranks) for tokens in args.tokens for ranks in args.ranks]
    rows = []
    for tokens, ranks in pairs:
        if args.quick and (tokens, ranks) not in BARS:
            continue
        packed = documents(tokens)
        for name in CASES:
            bounds = packed if name.startswith("packed") else [0, tokens]
            rows.append(measure(name, bounds, ranks, repeats, tuple(args.heads)))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if not args.no_record:
        record("context_parallel", rows)


if __name__ == "__main__":
    main()
