"""How long does a fine-tuning step of SmolLM2-135M take on cpu, next to transformers and torch?

    python benchmarks/bench_sft_step.py [--threads 1 2] [--length 128] [--dtype float32]

Two processes load the same weights and run alternately on the same samples: one runs the steps of
`posttrain_gpt.py`, the other model(...).loss.backward(), clipping and AdamW. Prints and records the
ratio of the medians; losses must be equal, or there is no result.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, WARM, SAMPLES, MICRO, RATE = 5, 1, 4, 2, 1e-5


def samples(length):
    """Return token ids of samples, the same in both processes."""
    import numpy as np

    return np.random.default_rng(0).integers(0, 49152, ((ROUNDS + WARM) * SAMPLES, length))


def our_steps(folder, length, dtype):
    """Return what runs the next step of our loop and returns its loss."""
    sys.path.insert(0, str(ROOT))
    import mindspeed_llm.megatron_adaptor  # noqa: F401
    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from mindspeed_llm.training.options import TrainOptions
    from tests.unit.mindspeed_llm.training.tiny_run import write_samples

    workspace = Path(tempfile.mkdtemp(dir=folder))
    data = write_samples(workspace / "data", [(ids, ids) for ids in samples(length)])
    options = TrainOptions(
        load=f"{folder}/model",
        data_path=(data,),
        no_shuffle=True,
        train_iters=ROUNDS + WARM,
        micro_batch_size=MICRO,
        global_batch_size=SAMPLES,
        lr=RATE,
        lr_decay_style="constant",
        bf16=dtype == "bfloat16",
    )
    trainer = AutoTrainer(options).trainer
    trainer.start_prefetch()
    state = trainer.training.state

    def step():
        nonlocal state
        state, result = trainer.loop.step(trainer, state)
        return result.metrics["lm loss"]

    return step


def their_steps(folder, length, dtype):
    """Return what runs the next step of a plain loop and returns its loss."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=getattr(torch, dtype))
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    batches = iter(torch.tensor(samples(length)).split(MICRO))

    def step():
        total = 0.0
        for _ in range(SAMPLES // MICRO):
            ids = next(batches)
            loss = model(input_ids=ids, labels=ids).loss / (SAMPLES // MICRO)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def work(arguments):
    """Time one step for every line on standard input."""
    import torch

    torch.set_num_threads(arguments.threads[0])
    make = {"ours": our_steps, "theirs": their_steps}[arguments.worker]
    step = make(arguments.folder, arguments.length, arguments.dtype)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step()
        print(json.dumps([time.perf_counter() - start, loss]), flush=True)


def start(name, folder, threads, arguments):
    """Start one worker, which runs steps on request."""
    command = [sys.executable, __file__, "--worker", name, "--folder", folder]
    command += ["--threads", str(threads), "--length", str(arguments.length)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MINDSPEED_DEVICE": "cpu"}
    return subprocess.Popen(
        [*command, "--dtype", arguments.dtype],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def measure(process):
    """Let one worker run a step; return its seconds and its loss."""
    process.stdin.write("go\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def compare(folder, threads, arguments):
    """Run both alternately; return the row of results."""
    workers = {name: start(name, folder, threads, arguments) for name in ("ours", "theirs")}
    times = {name: [] for name in workers}
    tolerance = 1e-4 if arguments.dtype == "float32" else 5e-2
    for _ in range(ROUNDS + WARM):
        found = {name: measure(process) for name, process in workers.items()}
        difference = abs(found["ours"][1] - found["theirs"][1])
        assert difference < tolerance, f"the losses differ: {found}"
        for name, (seconds, _) in found.items():
            times[name].append(seconds)
    for process in workers.values():
        process.stdin.close()
        process.wait()
    ours, theirs = (statistics.median(times[name][WARM:]) for name in ("ours", "theirs"))
    return {
        "threads": threads,
        "dtype": arguments.dtype,
        "tokens": SAMPLES * arguments.length,
        "ours_s": f"{ours:.3f}",
        "transformers_s": f"{theirs:.3f}",
        "ratio": f"{ours / theirs:.3f}",
    }


def main(arguments):
    """Measure with every number of threads, then print and record."""
    sys.path.insert(0, str(ROOT))
    from record import record

    from tests.llm.smollm2 import save_smollm2

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save_smollm2(Path(folder) / "model")
        for threads in arguments.threads:
            rows.append(compare(folder, threads, arguments))
            print(rows[-1], flush=True)
    record("sft_step", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--worker", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work(arguments) if arguments.worker else main(arguments)
