"""How fast is another project's own trainer on the adaptor?

    python benchmarks/bench_clients.py --site .clients/ms-swift/site-packages --shape tiny
    python benchmarks/bench_clients.py --site /folder/with/swift

Runs ms-swift's `megatron pt` as a subprocess on one device, on generated rows that are all full,
once at every level of the adaptor that is asked for. Seconds and losses are those of its own lines;
a run is ended after the last step that counts, before ms-swift saves.

ms-swift and mcore-bridge import transformer_engine whatever they are asked for, so where it is not
installed they do not run on plain megatron-core. The nearest to it is level 0: Megatron's own code,
with torch's products, norms and attention where it asks for transformer_engine.
"""

import argparse
import ast
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from commands import data  # noqa: E402
from commands.job import GLOBAL_BATCH  # noqa: E402
from record import record  # noqa: E402
from train_step.shapes import SHAPES  # noqa: E402

SHAPE_NAMES = {"1.5B": "qwen2.5-1.5b", "tiny": "tiny"}
TAIL = 25
TRAIN = """
import mindspeed.megatron_adaptor
import mindspeed
mindspeed.enable(optimization_level={level})
from importlib.util import find_spec
from swift.megatron import megatron_pretrain_main
from swift.megatron.callbacks.base import MegatronCallback
from swift.megatron.callbacks.mapping import megatron_callbacks_map

if find_spec("tensorboard") is None:  # ms-swift has no switch for a run without it
    megatron_callbacks_map["tensorboard"] = MegatronCallback
if __name__ == "__main__":
    megatron_pretrain_main()
"""
WEIGHTS = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM

torch.manual_seed(1)
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
model.bfloat16().cpu().save_pretrained(sys.argv[1])
"""
_LINE = re.compile(r"\{'loss': .*\}")


@dataclass(frozen=True)
class Step:
    """One line of ms-swift's log."""

    seconds: float
    loss: float
    peak_gib: float


def prepare(shape, folder, steps, environment):
    """Write the model with random weights, its tokenizer and full rows of text."""
    model, rows = folder / "model", folder / "rows.jsonl"
    print(f"preparing {folder}", flush=True)
    data.write_model(shape, model)
    subprocess.run([sys.executable, "-c", WEIGHTS, str(model)], check=True, env=environment)
    text = data.Text(shape.vocabulary, seed=1)
    with rows.open("w") as file:
        for _ in range((steps + 2) * GLOBAL_BATCH):
            # ms-swift ends every row with an end token.
            turn = {"role": "assistant", "content": text.draw(shape.sequence - 1)}
            file.write(json.dumps({"messages": [turn]}) + "\n")
    return model, rows


def flags(shape, model, rows, output, options):
    """Return the command line of `megatron pt`; what is not named is ms-swift's default."""
    values = {
        "model": model,
        "model_type": "qwen2",
        "template": "chatml",
        "dataset": rows,
        "output_dir": output,
        "add_version": "false",
        "torch_dtype": "bfloat16",
        "micro_batch_size": options.micro_batch,
        "global_batch_size": GLOBAL_BATCH,
        "max_length": shape.sequence,
        "train_iters": options.steps + 100,
        "lr": 1e-5,
        "lr_decay_style": "constant",
        "split_dataset_ratio": 0,
        "dataset_shuffle": "false",
        "train_dataloader_shuffle": "false",
        "dataset_num_proc": 1,
        "logging_steps": 1,
        "save_steps": 10**6,
        "check_model": "false",
        "perform_initialization": "true",
    }
    named = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [*named, *options.flags.split()]


def train(level, arguments, folder, environment, options):
    """Run ms-swift at a level until it has done its steps; return them."""
    script = folder / f"pt_level_{level}.py"
    script.write_text(TRAIN.format(level=level))
    lines, steps = deque(maxlen=TAIL), []
    with (folder / f"level_{level}.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        timer = threading.Timer(options.limit, process.kill)
        timer.start()
        total = 0.0
        for line in process.stdout:
            log.write(line)
            lines.append(line)
            if found := _LINE.search(line):
                step, total = read(ast.literal_eval(found[0]), len(steps) + 1, total)
                steps.append(step)
                if len(steps) == options.steps:
                    process.kill()
        process.wait()
        timer.cancel()
    if len(steps) < options.steps:
        sys.exit(f"level {level}: {len(steps)} steps, exit {process.returncode}\n{''.join(lines)}")
    return steps


def read(numbers, count, before):
    """Read a line: ms-swift prints seconds a step over all steps so far."""
    total = numbers["train_speed(s/it)"] * count
    return Step(total - before, numbers["loss"], numbers["memory(GiB)"]), total


def columns(level, steps, shape, options):
    """Return what is recorded of a run."""
    kept = steps[options.warm_up :]
    seconds = [step.seconds for step in kept]
    tokens = GLOBAL_BATCH * shape.sequence
    speed = tokens * len(kept) / sum(seconds)
    return {
        "client": f"ms-swift {_version(options)}",
        "shape": options.shape,
        "level": str(level),
        "micro_batch": str(options.micro_batch),
        "global_batch": str(GLOBAL_BATCH),
        "tokens_per_s": f"{speed:.0f}",
        "step_ms": f"{1000 * statistics.median(seconds):.1f}",
        "slowest_ms": f"{1000 * max(seconds):.1f}",
        "fastest_ms": f"{1000 * min(seconds):.1f}",
        "model_tflops": f"{speed * shape.flops_per_token / 1e12:.1f}",
        "reserved_gib": f"{steps[-1].peak_gib:.1f}",
        "steps": str(len(kept)),
        "first_loss": f"{steps[0].loss:.5f}",
        "last_loss": f"{steps[-1].loss:.5f}",
        "flags": options.flags,
    }


def _version(options):
    for path in options.site.split(os.pathsep):
        for found in Path(path).glob("ms_swift-*.dist-info"):
            return found.name.removeprefix("ms_swift-").removesuffix(".dist-info")
    return ""


def _environment(options):
    """Return the environment of the only rank, with the client's packages in front."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sites = [str(Path(path).resolve()) for path in options.site.split(os.pathsep) if path]
    paths = [*sites, str(ROOT), os.environ.get("PYTHONPATH", "")]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {
        **os.environ,
        **rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def show(results):
    """Print both runs, their ratio, and how far their losses are apart."""
    for row, _ in results:
        print("  ".join(f"{name} {row[name]}" for name in ("level", *list(row)[5:-1])))
    (first, ours), (last, theirs) = results[0], results[-1]
    ratio = float(first["tokens_per_s"]) / float(last["tokens_per_s"])
    apart = [abs(a.loss - b.loss) for a, b in zip(ours, theirs, strict=True)]
    print(f"level {first['level']} / level {last['level']}: {ratio:.3f} in tokens/s")
    print("losses apart, step by step:", " ".join(f"{each:.1e}" for each in apart))
    print(f"largest difference of losses: {max(apart):.2e}")


def _options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--site", default="", metavar="PATH[:PATH]", help="ms-swift's packages")
    parser.add_argument("--shape", choices=SHAPE_NAMES, default="1.5B")
    parser.add_argument("--levels", default="2,0", help="of the adaptor; the last is the baseline")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3, help="first steps that do not count")
    parser.add_argument("--flags", default="", help="more flags of ms-swift")
    parser.add_argument("--limit", type=float, default=280, help="seconds that a run may take")
    default = Path(tempfile.gettempdir()) / "bench_clients"
    parser.add_argument("--folder", type=Path, default=default, help="for inputs and logs")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def main():
    """Run the levels one after the other, print and record them."""
    options = _options()
    shape = SHAPES[SHAPE_NAMES[options.shape]]
    folder = options.folder.resolve() / options.shape
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print("ms-swift does not run without transformer_engine: level 0 stands for plain Megatron")
    model, rows = prepare(shape, folder, options.steps, _environment(options))
    results = []
    for level in map(int, options.levels.split(",")):
        output = folder / f"output_{level}"
        arguments = flags(shape, model, rows, output, options)
        steps = train(level, arguments, folder, _environment(options), options)
        results.append((columns(level, steps, shape, options), steps))
        print(f"level {level}: {results[-1][0]['tokens_per_s']} tokens/s", flush=True)
        record("clients", [results[-1][0]], options.results)
    show(results)


if __name__ == "__main__":
    main()
