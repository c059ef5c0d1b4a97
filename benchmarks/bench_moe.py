"""Benchmark one layer of SwiGLU experts against other training stacks.

    python benchmarks/bench_moe.py                       # all shapes and peers; under 4 minutes
    python benchmarks/bench_moe.py --quick               # two shapes; under 90 s
    python benchmarks/bench_moe.py --kernels gated       # time kernels of one GEMM, by tile

Routing is given: a mask and its weights, or numbers of experts and their weights, as each peer
takes them. All compute the same in bf16 and in one process, one after the other in every round; the
median counts. `kept` is what forward leaves for backward, tokens included; `floor` are the tokens
and the pre-activation alone, 2Td + 4TKn bytes. Peers whose package is missing are left out and
named. On a cpu a tiny shape shows that everything runs.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "moe_layer"))
import peers  # noqa: E402
import torch  # noqa: E402
from record import record  # noqa: E402

from mindspeed import device  # noqa: E402


@dataclass(frozen=True)
class Shape:
    """T tokens, d hidden, n columns of an expert, K of E experts for each token."""

    tokens: int
    hidden: int
    columns: int
    experts: int
    top_k: int

    @property
    def forward_flops(self):
        """Count the multiplications and additions of three GEMMs."""
        return 6 * self.tokens * self.top_k * self.hidden * self.columns

    @property
    def floor_bytes(self):
        """Count the tokens and the pre-activation in bf16."""
        return 2 * self.tokens * self.hidden + 4 * self.tokens * self.top_k * self.columns


SHAPES = {
    "d1536-n256": Shape(24576, 1536, 256, 128, 8),
    "d1536-n512": Shape(24576, 1536, 512, 64, 4),
    "d1536-n1024": Shape(24576, 1536, 1024, 32, 2),
    "d4096-n1024": Shape(32768, 4096, 1024, 64, 4),
    "qwen3-30b-a3b": Shape(16384, 2048, 768, 128, 8),
    "tiny": Shape(96, 64, 64, 4, 2),
}
ALL = tuple(name for name in SHAPES if name != "tiny")
QUICK = ("d1536-n512", "qwen3-30b-a3b")
WARM_UP, ROUNDS, QUICK_ROUNDS = 3, 12, 6
AHEAD = 4_000_000  # cycles, about 2 ms, in which launches run ahead as they do in a model


class Clock:
    """Seconds of a call on the device that MindSpeed chose."""

    def __init__(self):
        self.is_cuda = device.current().name == "cuda"

    def seconds(self, function):
        """Return the result of a call and its time, launches hidden where they run ahead."""
        if not self.is_cuda:
            began = time.perf_counter()
            result = function()
            return result, time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD)
        start.record()
        result = function()
        end.record()
        end.synchronize()
        return result, start.elapsed_time(end) / 1e3

    def allocated(self):
        """Return the allocated bytes; nothing is known on a cpu."""
        return torch.cuda.memory_allocated() if self.is_cuda else 0


def draw(shape, dtype):
    """Return the tensors of a layer; experts get about equally many tokens."""
    torch.manual_seed(1)
    where = device.current().torch_device

    def randn(*size):
        return torch.randn(size, device=where, dtype=dtype) * size[-1] ** -0.5

    scores = torch.rand(shape.tokens, shape.experts, device=where).topk(shape.top_k)
    return peers.Layer(
        x=randn(shape.tokens, shape.hidden) * shape.hidden**0.5,
        chosen=scores.indices,
        probs=scores.values / scores.values.sum(-1, keepdim=True),
        first=randn(shape.experts, 2 * shape.columns, shape.hidden),
        second=randn(shape.experts, shape.hidden, shape.columns),
        grad=randn(shape.tokens, shape.hidden),
    )


def build(layer, names):
    """Return the peers that can be built here, each with its leaves and its forward."""
    built = {}
    for name in names:
        try:
            built[name] = peers.PEERS[name](layer)
        except (ImportError, AttributeError) as error:
            print(f"  {name} is left out: {error}", flush=True)
    return built


def step(clock, layer, leaves, forward):
    """Return output, gradients, seconds of forward and backward, and bytes kept in between."""
    before = clock.allocated()
    out, forward_seconds = clock.seconds(forward)
    kept = clock.allocated() - before - out.nbytes + layer.x.nbytes
    grads, backward_seconds = clock.seconds(
        lambda: torch.autograd.grad(out, leaves, layer.grad, allow_unused=True)
    )
    return out.detach(), grads[0], (forward_seconds, backward_seconds), kept


def measure(clock, layer, built, rounds):
    """Warm all peers up, compare their results, then run them alternately."""
    samples, kept, first = {}, {}, None
    for name in list(built):
        began = time.perf_counter()
        try:
            for _ in range(WARM_UP):
                out, grad_x, _, kept[name] = step(clock, layer, *built[name])
        except Exception as error:  # compilers and autotuners of other packages raise anything
            print(f"  {name} is left out: {str(error).splitlines()[0][:200]}", flush=True)
            del built[name]
            continue
        found = [out.float(), grad_x.float()]
        first = first or found
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, first, strict=True)]
        seconds = time.perf_counter() - began
        print(
            f"  {name}: warm after {seconds:.1f} s; output and dX differ from the first by "
            f"{errors[0]:.1e}, {errors[1]:.1e}",
            flush=True,
        )
        samples[name] = []
        del out, grad_x, found
    for _ in range(rounds):
        for name in samples:
            samples[name].append(step(clock, layer, *built[name])[2])
    return samples, kept


def lines(shape_name, samples, kept):
    """Return a row of the table for each peer."""
    shape = SHAPES[shape_name]
    for name, rounds in samples.items():
        forward, backward = (statistics.median(part) for part in zip(*rounds, strict=True))
        work = shape.forward_flops / 1e12
        yield {
            "shape": shape_name,
            "peer": name,
            "fwd_ms": f"{forward * 1e3:.2f}",
            "bwd_ms": f"{backward * 1e3:.2f}",
            "fwd_tflops": f"{work / forward:.0f}",
            "bwd_tflops": f"{2 * work / backward:.0f}",
            "full_tflops": f"{3 * work / (forward + backward):.0f}",
            "kept_mib": f"{kept[name] / 2**20:.0f}",
            "floor_mib": f"{shape.floor_bytes / 2**20:.0f}",
            "kept_ratio": f"{kept[name] / shape.floor_bytes:.3f}",
        }


def run(options):
    """Measure all shapes, as long as there is time."""
    clock = Clock()
    dtype = torch.bfloat16 if clock.is_cuda else torch.float32
    began, table = time.perf_counter(), []
    for shape_name in options.shapes:
        if time.perf_counter() - began > options.seconds:
            print(f"{shape_name} and what follows are left out: no time left", flush=True)
            break
        print(f"{shape_name}: {SHAPES[shape_name]}", flush=True)
        layer = draw(SHAPES[shape_name], dtype)
        rounds = QUICK_ROUNDS if options.quick else ROUNDS
        built = build(layer, options.only)
        rows = list(lines(shape_name, *measure(clock, layer, built, rounds)))
        for row in rows:
            print("  ".join(f"{value:>16}" for value in row.values()), flush=True)
        table += rows
        if clock.is_cuda and not options.no_record:
            record("moe_layer", rows)
        del layer, built
        if clock.is_cuda:
            torch.cuda.empty_cache()
    print("columns: " + ", ".join(table[0]))


def main():
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default="", metavar="NAME,...", help=", ".join(SHAPES))
    parser.add_argument("--only", default="", metavar="PEER,...", help=", ".join(peers.PEERS))
    parser.add_argument("--quick", action="store_true", help="two shapes, few rounds")
    parser.add_argument("--seconds", type=float, default=200, help="start no shape after these")
    parser.add_argument("--kernels", metavar="GEMM", help="time the tiles of one of our GEMMs")
    parser.add_argument("--no-record", action="store_true", help="do not append to results")
    options = parser.parse_args()
    has_cuda = device.current().name == "cuda"
    default = (QUICK if options.quick else ALL) if has_cuda else ("tiny",)
    options.shapes = options.shapes.split(",") if options.shapes else default
    options.only = options.only.split(",") if options.only else list(peers.DEFAULT)
    unknown = (set(options.shapes) - set(SHAPES)) | (set(options.only) - set(peers.PEERS))
    if unknown:
        sys.exit(f"not known: {', '.join(unknown)}; see --help")
    if options.kernels:
        import tiles

        layer = draw(SHAPES[options.shapes[0]], torch.bfloat16)
        return tiles.time_tiles(layer, options.kernels, Clock())
    # Its autotuning takes minutes at these shapes; LIGER_FUSED_MOE_AUTOTUNE=1 has it nevertheless.
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    run(options)


if __name__ == "__main__":
    main()
