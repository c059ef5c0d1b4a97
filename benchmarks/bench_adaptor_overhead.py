"""Does the adaptor cost anything where Megatron already runs? A step of plain Megatron and of ours.

    python benchmarks/bench_adaptor_overhead.py

Two processes build the same GPT (local spec), one with the adaptor at level 0, and take turns on
the one device, so that clocks and neighbours disturb both alike. Prints the ratio of the medians.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

ROUNDS, STEPS = 12, 5


def worker(is_adapted):
    """Build the model, then time `STEPS` training steps for every line on standard input."""
    import torch

    if is_adapted:
        import mindspeed.megatron_adaptor  # noqa: F401  # isort: skip
    from gpt_step import build_step

    step = build_step()
    for _ in range(5):
        step()
    for _ in sys.stdin:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        print(json.dumps((time.perf_counter() - start) / STEPS), flush=True)


def start(mode):
    """Start one worker that waits for its turn."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, __file__, "--worker", mode]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def measure(process):
    """Let one worker run its steps and return the seconds a step took."""
    process.stdin.write("go\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main():
    """Take turns, then print and record the ratio."""
    from record import record

    workers = {mode: start(mode) for mode in ("plain", "adapted")}
    times = {mode: [] for mode in workers}
    for _ in range(ROUNDS):
        for mode, process in workers.items():
            times[mode].append(measure(process))
    for process in workers.values():
        process.stdin.close()
        process.wait()
    plain, adapted = (statistics.median(times[mode]) * 1e3 for mode in ("plain", "adapted"))
    print(f"plain {plain:.2f} ms, level 0 {adapted:.2f} ms, ratio {adapted / plain:.4f}")
    row = {"plain_ms": f"{plain:.3f}", "level0_ms": f"{adapted:.3f}"}
    record("adaptor_overhead", [row | {"ratio": f"{adapted / plain:.4f}"}])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worker", choices=("plain", "adapted"), help=argparse.SUPPRESS)
    mode = parser.parse_args().worker
    worker(mode == "adapted") if mode else main()
