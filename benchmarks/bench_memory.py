"""Benchmark what the memory features save and cost, each against the plain run.

    python benchmarks/bench_memory.py                             # every bar, in one call
    python benchmarks/bench_memory.py --only long-1.5B,long-8B    # those that take minutes each
    python benchmarks/bench_memory.py --shape tiny --steps 4      # on a cpu: that all rows run

Every row is `pretrain_gpt.py` on the same generated data with some flags more, by default on 12
layers of the 8B shape at sequence 8192. The base runs before and after its rows. Printed for each
row: step time over the base's, GiB saved at the peak, GiB that theory says, whether the loss of
every step is the base's, and whether the bar is met. Rows of long sequences are one whole step of a
whole model; they print bytes a token on device and host, and the lengths at which both are full.
The peer row is the longest sequence of transformers with Liger and layer checkpoints on the host,
found by bisection; the bubble row is the idle time of four pipeline stages, on a cpu anywhere.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench_commands import LAYERS, SHAPE_NAMES, Failed, run  # noqa: E402
from commands import data, logs  # noqa: E402
from commands.job import GLOBAL_BATCH, Command, Job  # noqa: E402
from commands.ours import RATE  # noqa: E402
from record import record  # noqa: E402
from train_step.shapes import SHAPES  # noqa: E402

GIB, WIDTH = 2**30, 2  # bfloat16
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Row:
    """Flags, the row they are measured against, and the tensors that they are to save."""

    flags: tuple[str, ...]
    base: str = "plain"
    saves: tuple[str, ...] = ()
    bar: tuple[float, float] | None = None
    """The least share of the theory that it saves, and the most time, relative to the base."""

    def verdict(self, saved, theory, time_ratio):
        """Say whether the bar is met."""
        if self.bar is None:
            return "-"
        share, slowest = self.bar
        return "met" if saved >= share * theory and time_ratio <= slowest else "missed"


@dataclass(frozen=True)
class Long:
    """One step on one very long sequence."""

    shape: str
    length: int
    flags: tuple[str, ...]


FULL = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
UNFUSED = ("--no-use-fused-swiglu",)
ROWS = {
    "plain": Row(()),
    "recompute-norm": Row(("--recompute-norm",), saves=("norm",)),
    "swap-attention": Row(("--swap-attention",), saves=("attention",), bar=(0.95, 1.01)),
    "swap-and-norm": Row(("--swap-attention", "--recompute-norm"), saves=("attention", "norm")),
    "reuse-fp32-param": Row(("--reuse-fp32-param",), saves=("master",), bar=(0.95, 1.01)),
    "swap-optimizer": Row(("--swap-optimizer",), saves=("master", "master", "moments")),
    "tiled-mlp": Row(("--tiled-mlp-size", "2048"), saves=("mlp",)),
    "full-recompute": Row(FULL),
    "swap-layer-input": Row((*FULL, "--swap-layer-input"), "full-recompute", ("input",)),
    "all": Row(
        ("--swap-attention", "--recompute-norm", "--reuse-fp32-param"),
        saves=("attention", "norm", "master"),
    ),
    # The fused MLP keeps no activation anyhow: the recompute is for MLPs that are not fused.
    "unfused-mlp": Row(UNFUSED),
    "recompute-activation": Row(
        (*UNFUSED, "--recompute-activation-function"), "unfused-mlp", ("activation",)
    ),
    "activation-and-norm": Row(
        (*UNFUSED, "--recompute-activation-function", "--recompute-norm"),
        "unfused-mlp",
        ("activation", "norm"),
        bar=(0.95, 1.02),
    ),
}
TILES = ("--tiled-mlp-size", "4096", "--tiled-loss-size", "4096", "--swap-layer-input")
LONG = {
    "long-1.5B": Long("1.5B", 524_288, (*FULL, *TILES, "--swap-optimizer")),
    # Adam's state does not fit the host beside 64 GiB of layer inputs: this is about forward
    # and backward.
    "long-8B": Long("8B", 262_144, (*FULL, *TILES, "--optimizer", "sgd", "--sgd-momentum", "0")),
}
PEER, BUBBLE = "peer-1.5B", "zb-h1-bubble"
ALL = (*ROWS, *LONG, PEER, BUBBLE)
PEER_FIRST, PEER_MOST, PEER_STEP = 262_144, 2**21, 8192
"""Lengths: the first attempt, the longest one, and the unit."""
PEER_LAYERS = 2
BUBBLE_BAR = 0.4
DEVICE_GIB, HOST_GIB = 139, 128  # of the machine that the bars are about


def bytes_of(shape, kind):
    """Return what theory says that one kind of tensors takes, of one micro-batch of one sample."""
    heads = 2 * shape.heads + 2 * shape.kv_heads  # queries and outputs, keys and values
    elements = {
        "norm": 2 * shape.hidden,
        "attention": heads * shape.head_size,
        # An unfused SwiGLU keeps silu of the gate too; Megatron's own function is one operator.
        "activation": shape.ffn,
        "mlp": 2 * shape.ffn + shape.hidden,
        "input": shape.hidden,
    }
    if kind in ("master", "moments"):
        embedding = 0 if shape.is_tied else shape.hidden * shape.vocabulary
        return (8 if kind == "moments" else WIDTH) * (shape.matrix_parameters + embedding)
    return WIDTH * shape.layers * shape.sequence * elements[kind]


def measure(name, job, options):
    """Run one row; return median seconds of a step, peak GiB and losses."""
    row, folder = ROWS[name], job.folder
    sizes = ("--micro-batch-size", "1", "--global-batch-size", str(MICRO_BATCHES))
    argv = [
        *(sys.executable, str(ROOT / "pretrain_gpt.py"), "--hf-cfg-dir", str(folder / "model")),
        *("--from-scratch", "--bf16", "--seq-length", str(job.shape.sequence), *sizes),
        *("--train-iters", str(options.steps), *RATE),
        *("--data-path", str(folder / "pretrain"), *row.flags),
    ]
    log = logs.read_megatron(run(Command(argv, "megatron"), job, name, options.limit), None)
    if len(log.steps) <= options.warm_up or log.peak_gib is None:
        raise Failed(f"its log has {len(log.steps)} steps and the peak {log.peak_gib}")
    seconds = median(step.seconds for step in log.steps[options.warm_up :])
    return seconds, log.peak_gib, [step.loss for step in log.steps]


def measure_all(names, job, options):
    """Run the rows, each base before and after its rows; return runs by name."""
    results = {name: [] for name in names}
    bases = [name for name in names if any(ROWS[each].base == name for each in names)]
    for name in [*names, *bases]:
        try:
            results[name].append(measure(name, job, options))
        except Failed as error:
            print(f"{name} failed: {error}", flush=True)
            continue
        seconds, peak, losses = results[name][-1]
        print(f"{name}: {1e3 * seconds:.1f} ms, {peak:.2f} GiB, loss {losses[-1]:.6f}", flush=True)
    return {name: runs for name, runs in results.items() if runs}


def table(results, job, options):
    """Compare every row with its base; return the lines to record."""
    lines = []
    for name, runs in results.items():
        row = ROWS[name]
        if row.base not in results:
            continue
        bases = results[row.base]
        base_seconds = sum(seconds for seconds, *_ in bases) / len(bases)
        seconds, peak, losses = runs[0]
        saved = bases[0][1] - peak
        expected = sum(bytes_of(job.shape, kind) for kind in row.saves) / GIB
        lines.append(
            {
                "shape": options.shape,
                "layers": str(job.shape.layers),
                "row": name,
                "base": row.base,
                "step_ms": f"{1e3 * seconds:.1f}",
                "time_ratio": f"{seconds / base_seconds:.4f}",
                "peak_gib": f"{peak:.2f}",
                "saved_gib": f"{saved:.2f}",
                "theory_gib": f"{expected:.2f}",
                "same_loss": str(losses == bases[0][2]),
                "bar": row.verdict(saved, expected, seconds / base_seconds),
                "flags": " ".join(row.flags),
            }
        )
    return lines


def measure_long(name, options):
    """Run one step on a long sequence; return the line to record."""
    row = LONG[name]
    shape, length = SHAPES[SHAPE_NAMES[row.shape]], row.length
    if options.shape == "tiny":
        shape, length = SHAPES["tiny"], 16 * SHAPES["tiny"].sequence
    # A step of the generated data has GLOBAL_BATCH rows: one long one here.
    shape = replace(shape, sequence=length // GLOBAL_BATCH)
    folder = options.folder.resolve() / name
    job = Job(shape, row.shape, steps=2, folder=folder)
    data.prepare(job)
    argv = [
        *(sys.executable, str(ROOT / "pretrain_gpt.py"), "--hf-cfg-dir", str(folder / "model")),
        *("--from-scratch", "--bf16", "--seq-length", str(length), "--linear-cross-entropy"),
        *("--max-position-embeddings", str(length), "--micro-batch-size", "1"),
        *("--global-batch-size", "1", "--train-iters", "1", *RATE),
        *("--data-path", str(folder / "pretrain"), *row.flags),
    ]
    log = logs.read_megatron(run(Command(argv, "megatron"), job, name, options.limit), None)
    if not log.steps or log.peak_gib is None or log.host_gib is None:
        raise Failed(f"its log has {len(log.steps)} steps and the peak {log.peak_gib}")
    return {
        "row": name,
        "tokens": str(length),
        "step_s": f"{log.steps[0].seconds:.1f}",
        "peak_gib": f"{log.peak_gib:.2f}",
        "host_gib": f"{log.host_gib:.2f}",
        "device_bytes_per_token": f"{log.peak_gib * GIB / length:.0f}",
        "host_bytes_per_token": f"{log.host_gib * GIB / length:.0f}",
        "tokens_at_full_device": f"{DEVICE_GIB / log.peak_gib * length:.0f}",
        "tokens_at_full_host": f"{HOST_GIB / log.host_gib * length:.0f}",
        "loss": f"{log.steps[0].loss:.6f}",
        "flags": " ".join(row.flags),
    }


def measure_all_long(names, options):
    """Run the rows of long sequences, print and record them; return how many ran."""
    lines = []
    for name in names:
        try:
            lines.append(measure_long(name, options))
        except Failed as error:
            print(f"{name} failed: {error}", flush=True)
            continue
        print("  ".join(f"{key}={value}" for key, value in lines[-1].items()), flush=True)
    if lines:
        record("memory_long", lines, options.results)
    return len(lines)


def measure_peer(options):
    """Search the longest sequence of the peer within a time; return whether there is one."""
    shape, first, most = SHAPES[SHAPE_NAMES["1.5B"]], PEER_FIRST, PEER_MOST
    if options.shape == "tiny":
        shape, first, most = SHAPES["tiny"], 512, 1024
    job = Job(shape, "1.5B", steps=1, folder=options.folder.resolve() / PEER)
    data.write_model(shape, job.folder / "model")
    best, refused, until = None, None, time.monotonic() + options.peer_seconds
    length = first
    while length <= most and (left := until - time.monotonic()) > 0:
        try:
            best = _peer_step(job, length, left)
        except Failed as error:
            if "out of memory" not in str(error).lower():
                print(f"{PEER} at {length} failed: {error}", flush=True)
                break
            refused = length
        print(f"{PEER} at {length}: {'out of memory' if refused == length else best}", flush=True)
        length = _next_length(0 if best is None else best["length"], refused)
        if length is None:
            break
    if best is None:
        return False
    line = {
        "row": PEER,
        "tokens": str(best["length"]),
        "out_of_memory_at": str(refused),
        "layers_computed": f"{PEER_LAYERS} of {shape.layers}",
        "step_s": f"{best['seconds']:.1f}",
        "peak_gib": f"{best['peak_gib']:.2f}",
        "device_bytes_per_token": f"{best['peak_gib'] * GIB / best['length']:.0f}",
        "host_bytes_per_token": str(WIDTH * shape.layers * shape.hidden),
    }
    print("  ".join(f"{key}={value}" for key, value in line.items()), flush=True)
    record("memory_peer", [line], options.results)
    return True


def _peer_step(job, length, limit):
    script = ROOT / "benchmarks" / "commands" / "hf_long.py"
    argv = [sys.executable, str(script), "--model", str(job.folder / "model")]
    argv += ["--length", str(length), "--layers", str(min(PEER_LAYERS, job.shape.layers))]
    command = Command(argv, "json", env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    lines = run(command, job, f"{PEER}_{length}", limit)
    return next(json.loads(line) for _, line in reversed(lines) if line.startswith("{"))


def _next_length(fits, refused):
    """Return the next length to try; None when they are near enough."""
    if refused is None:
        return 2 * fits
    middle = (fits + refused) // 2 // PEER_STEP * PEER_STEP
    return middle if middle - fits > fits // 16 and middle > 0 else None


def measure_bubble(options):
    """Run the schedules on four ranks of a cpu; return whether the bar is met."""
    job = Job(SHAPES["tiny"], "tiny", steps=1, folder=options.folder.resolve() / BUBBLE)
    script = ROOT / "benchmarks" / "commands" / "bubble.py"
    command = Command([sys.executable, str(script)], "json", env={"MINDSPEED_DEVICE": "cpu"})
    try:
        lines = run(command, job, BUBBLE, options.limit)
    except Failed as error:
        print(f"{BUBBLE} failed: {error}", flush=True)
        return False
    found = next(json.loads(line) for _, line in reversed(lines) if line.startswith("{"))
    ratio = found["idle_zb_h1"] / found["idle_1f1b"]
    line = {"row": BUBBLE, **{key: f"{value:g}" for key, value in found.items()}}
    line |= {"ratio": f"{ratio:.3f}", "bar": "met" if ratio <= BUBBLE_BAR else "missed"}
    print("  ".join(f"{key}={value}" for key, value in line.items()), flush=True)
    record("memory_bubble", [line], options.results)
    return ratio <= BUBBLE_BAR


def _options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="ROW,...", help=", ".join(ALL))
    parser.add_argument("--shape", choices=SHAPE_NAMES, default="8B")
    parser.add_argument("--layers", type=int, help="12 of the 8B shape by default")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3, help="steps that are not measured")
    parser.add_argument("--limit", type=float, default=540, help="seconds that one row may take")
    parser.add_argument(
        "--peer-seconds", type=float, default=180, help="seconds for all lengths of the peer"
    )
    default = Path(tempfile.gettempdir()) / "bench_memory"
    parser.add_argument("--folder", type=Path, default=default, help="for inputs and logs")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def main():
    """Run the rows that were asked for."""
    options = _options()
    asked = options.only.split(",") if options.only else list(ALL)
    if unknown := [name for name in asked if name not in ALL]:
        sys.exit(f"--only {','.join(unknown)}: use rows of {', '.join(ALL)}")
    chosen, long = ([n for n in asked if n in rows] for rows in (ROWS, LONG))
    is_complete = [_race(chosen, options) if chosen else True]
    is_complete.append(measure_bubble(options) if BUBBLE in asked else True)
    is_complete.append(measure_peer(options) if PEER in asked else True)
    is_complete.append(measure_all_long(long, options) == len(long))
    return None if all(is_complete) else 1


def _race(chosen, options):
    """Run rows against their bases; return whether all ran."""
    names = list(dict.fromkeys([*(ROWS[name].base for name in chosen), *chosen]))
    shape = SHAPES[SHAPE_NAMES[options.shape]]
    layers = options.layers or (12 if options.shape in LAYERS else shape.layers)
    folder = options.folder.resolve() / f"{options.shape}_{layers}"
    job = Job(replace(shape, layers=layers), options.shape, steps=2, folder=folder)
    data.prepare(job)
    lines = table(measure_all(names, job, options), job, options)
    for line in lines:
        print("  ".join(f"{line[name]:>12}" for name in list(line)[2:11]))
    if lines:
        record("memory", lines, options.results)
    return len(lines) == len(names)


if __name__ == "__main__":
    sys.exit(main())
