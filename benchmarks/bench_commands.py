"""Benchmark whole training commands, as a user types them.

    python benchmarks/bench_commands.py --list
    python benchmarks/bench_commands.py --only pretrain:2,pretrain:4,torchtitan:2
    python benchmarks/bench_commands.py --site torchtitan=/path/one:/path/two --site peers=/path
    python benchmarks/bench_commands.py --shape 8B --only pretrain:1
    python benchmarks/bench_commands.py --shape olmoe --only pretrain-reuse-fp32:2,torchtitan:1
    python benchmarks/bench_commands.py --sequence 131072 --global-batch 1 --steps 4 --warm-up 2 \\
        --only pretrain-recompute:1,torchtitan-recompute:1

Every row is a command that runs by itself on generated data: ours, Megatron-LM's script with and
without the one import, ms-swift on the adaptor, torchtitan's trainer, scripts on transformers and
TRL, llamafactory-cli. Speed and peak memory are those of its own log, without the warm-up steps.
Padding does not count as tokens. A row that fails is reported, and the others continue. The 8B
shape has as many of its 32 layers as fit the device with AdamW (--layers).
"""

import argparse
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from commands import data, logs, ours, pairs, peers  # noqa: E402
from commands.job import GLOBAL_BATCH, PROMPT_SHARE, Job  # noqa: E402
from record import record  # noqa: E402
from train_step.shapes import SHAPES  # noqa: E402

CASES = ours.CASES | peers.CASES | pairs.CASES
SHAPE_NAMES = {"1.5B": "qwen2.5-1.5b", "8B": "llama3-8b", "smollm2": "smollm2-135m"}
SHAPE_NAMES |= {"olmoe": "olmoe-7b", "tiny": "tiny", "tiny-moe": "tiny-moe"}
LAYERS = {"8B": 20}
"""18 bytes a weight: 20 layers need 91 GiB beside their activations, 32 would need 135."""
RATIOS = (
    ("pretrain:2", "torchtitan:2"),
    ("pretrain:4", "torchtitan:4"),
    ("pretrain:1", "torchtitan:1"),
    ("pretrain-recompute:1", "torchtitan-recompute:1"),
    ("pretrain-keep-attention:1", "torchtitan-recompute:1"),
    ("pretrain-deterministic:2", "pretrain:2"),
    ("sft-packed:2", "pretrain:2"),
    ("sft-packed:4", "pretrain:4"),
    ("sft-variable:22", "pretrain:4"),
    ("sft-packed:2", "hf-packed:2"),
    ("sft-packed:2", "trl-packed:2"),
    ("sft-packed:2", "llamafactory:2"),
    ("lora-packed:2", "sft-packed:2"),
    ("lora-packed:4", "sft-packed:4"),
    ("lora-packed:8", "sft-packed:8"),
    ("lora-packed:2", "hf-lora:2"),
    ("lora-packed:4", "hf-lora:4"),
    ("lora-packed:2", "trl-lora:2"),
    ("lora-packed:2", "llamafactory-lora:2"),
    ("megatron-lm-mindspeed:2", "megatron-lm:2"),
    ("ms-swift:2", "ms-swift-level-0:2"),
    ("dpo:4", "dpo-unshared:4"),
    ("dpo:4", "trl-dpo:4"),
    ("dpo:4", "trl-dpo-liger:4"),
)
TAIL = 15


class Failed(Exception):
    """A row has no result."""


def run(command, job, row, limit):
    """Run a command, to its end or its last step; return its lines with their times."""
    path = job.folder / "logs" / f"{row.replace(':', '_')}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    began, lines = time.perf_counter(), []
    pattern, count = command.stop_after or ("", 0)
    is_stopped = False
    with path.open("w") as file:
        process = subprocess.Popen(
            command.argv,
            cwd=job.folder,
            env=_environment(command, job),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        timer = threading.Timer(limit, process.kill)
        timer.start()
        for line in process.stdout:
            lines.append((time.perf_counter() - began, line.rstrip("\n")))
            file.write(line)
            file.flush()
            if count and not is_stopped and re.search(pattern, line):
                count -= 1
                if is_stopped := count == 0:
                    process.kill()
        code = process.wait()
        timer.cancel()
    if time.perf_counter() - began > limit:
        raise Failed(f"not done after {limit:g} s; its lines are in {path}")
    if code and not is_stopped:
        last = "\n".join(f"    {line}" for _, line in deque(lines, TAIL))
        raise Failed(f"exit code {code}; {path} ends with\n{last}")
    return lines


def _environment(command, job):
    """Return the environment of one rank, with the packages of this command first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [job.sites.get(command.site, ""), str(ROOT), str(ROOT / "benchmarks")]
    paths.append(os.environ.get("PYTHONPATH", ""))
    rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "MASTER_PORT": str(port),
        **{name: str(value) for name, value in rank.items()},
        **command.env,
    }


def measure(row, job, options):
    """Run one row; return its columns."""
    name, _, batch = row.partition(":")
    is_start = name.endswith("-start")
    job = replace(job, steps=3) if is_start else job
    command = CASES[name].build(job, int(batch))
    log = logs.FORMATS[command.log](run(command, job, row, options.limit), command.tokens_per_step)
    warm_up = 1 if is_start else min(options.warm_up, job.steps - 1)
    if len(log.steps) <= warm_up:
        raise Failed(f"its log has {len(log.steps)} steps, of which {warm_up} are warm-up")
    columns = logs.summarise(log, warm_up)
    flops = float(columns["tokens_per_s"]) * job.shape.flops_per_token
    return {
        "shape": _shape_name(options),
        "layers": str(job.shape.layers),
        "row": name,
        "micro_batch": batch,
        "global_batch": str(command.global_batch or job.global_batch),
        "prompt_share": f"{job.prompt_share:g}" if name in pairs.CASES else "",
        **columns,
        "model_tflops": "" if name == "vlm" else f"{flops / 1e12:.1f}",
        "packages": _versions(command, job),
    }


def _shape_name(options):
    return f"{options.shape}@{options.sequence}" if options.sequence else options.shape


def _versions(command, job):
    """Return the versions of the packages that a command imports."""
    paths = [*job.sites.get(command.site, "").split(os.pathsep), *sys.path]
    found = {}
    for one in importlib.metadata.distributions(path=[path for path in paths if path]):
        found.setdefault(one.name.lower().replace("_", "-"), one.version)
    return " ".join(f"{name}={found[name]}" for name in command.packages if name in found)


def measure_all(rows, job, options):
    """Run row after row; return the columns of those that have a result."""
    results = {}
    for number, row in enumerate(rows, 1):
        print(f"[{number}/{len(rows)}] {row} ...", flush=True)
        try:
            results[row] = measure(row, job, options)
        except Failed as error:
            print(f"[{number}/{len(rows)}] {row} failed: {error}", flush=True)
            continue
        shown = results[row]
        print(
            f"[{number}/{len(rows)}] {row}: {shown['tokens_per_s']} tokens/s, "
            f"{shown['peak_gib'] or '?'} GiB, first step {shown['first_step_s']} s",
            flush=True,
        )
        record("commands", [shown], options.results)
    return results


def show(results):
    """Print the table and the ratios."""
    columns = ("row", "micro_batch", "tokens_per_s", "mean_tokens_per_s", "slowest", "fastest")
    columns += ("model_tflops", "peak_gib", "first_step_s", "until_step_1_s", "loss")
    print("  ".join(f"{name:>17}" for name in columns))
    for line in results.values():
        print("  ".join(f"{line[name]:>17}" for name in columns))
    for one, other in RATIOS:
        if one in results and other in results:
            # Of the median: a reference that runs ahead makes the last step of a run short.
            ours_, theirs = (float(results[row]["tokens_per_s"]) for row in (one, other))
            print(f"{one} / {other}: {ours_ / theirs:.3f}")


def rows_of(options):
    """Return the rows to run, each with its micro-batch."""
    every = [
        f"{name}:{batch}"
        for name, case in CASES.items()
        if options.shape in case.shapes
        for batch in ((1,) if options.shape == "8B" else case.micro_batches)
    ]
    if not options.only:
        return every
    chosen = []
    for selected in options.only.split(","):
        name, _, batch = selected.partition(":")
        if name not in CASES or (batch and not batch.isdecimal()):
            sys.exit(f"--only {selected}: use NAME or NAME:BATCH, of {', '.join(CASES)}")
        if batch:
            chosen.append(selected)
        else:
            if not (found := [row for row in every if row.partition(":")[0] == name]):
                sys.exit(f"--only {name}: no row at --shape {options.shape}; name a micro-batch")
            chosen += found
    return chosen


def _list(options):
    for name, case in CASES.items():
        batches = ", ".join(map(str, case.micro_batches))
        print(f"{name:28} {case.about} (micro-batch {batches}; {', '.join(case.shapes)})")


def _share(text):
    share = float(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a share between 0 and 1")
    return share


def _options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument("--only", default="", metavar="ROW,...", help="NAME or NAME:MICRO-BATCH")
    parser.add_argument("--shape", choices=SHAPE_NAMES, default="1.5B")
    parser.add_argument("--layers", type=int, help="use fewer layers")
    parser.add_argument("--sequence", type=int, help="tokens of a row, instead of the shape's")
    parser.add_argument("--global-batch", type=int, default=GLOBAL_BATCH, help="rows of a step")
    parser.add_argument(
        "--prompt-share",
        type=_share,
        default=PROMPT_SHARE,
        help="of the tokens of a sequence (dpo)",
    )
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warm-up", type=int, default=4, help="steps that are not measured")
    parser.add_argument("--limit", type=float, default=500, help="seconds that one row may take")
    parser.add_argument(
        "--site",
        action="append",
        default=[],
        metavar="NAME=PATH[:PATH]",
        help="packages of a peer: torchtitan, peers (transformers' and TRL's), llamafactory, "
        "ms_swift, megatron_lm (a checkout)",
    )
    parser.add_argument(
        "--attention", default="auto", help="of transformers' models: sdpa, flash_attention_4, ..."
    )
    default = Path(tempfile.gettempdir()) / "bench_commands"
    parser.add_argument("--folder", type=Path, default=default, help="for inputs and logs")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def main():
    """Prepare the inputs, run the rows, print the table."""
    options = _options()
    if options.list:
        return _list(options)
    rows = rows_of(options)
    shape = SHAPES[SHAPE_NAMES[options.shape]]
    layers = options.layers or LAYERS.get(options.shape, shape.layers)
    if layers != shape.layers:
        print(f"{layers} of the {shape.layers} layers of {SHAPE_NAMES[options.shape]}", flush=True)
    sites = dict(one.split("=", 1) for one in options.site)
    job = Job(
        replace(shape, layers=layers, sequence=options.sequence or shape.sequence),
        options.shape,
        options.steps,
        options.folder.resolve() / f"{_shape_name(options)}_{layers}",
        sites,
        options.attention,
        options.global_batch,
        options.prompt_share,
    )
    data.prepare(job, any(CASES[row.partition(":")[0]].has_conversations for row in rows))
    results = measure_all(rows, job, options)
    show(results)
    return None if results else 1


if __name__ == "__main__":
    sys.exit(main())
