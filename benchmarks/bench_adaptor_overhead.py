"""Does the adaptor cost anything where Megatron already runs? A step of plain Megatron and of ours.

    python benchmarks/bench_adaptor_overhead.py

Two processes build the same GPT (local spec), one with the adaptor at level 0, and run alternately
on the one device, so that clocks and neighbours affect both alike. Prints the ratio of the
medians.
"""

import argparse
import statistics

from workers import Worker, serve

ROUNDS, STEPS = 12, 5


def work(is_adapted):
    """Build the model and serve steps of it."""
    if is_adapted:
        import mindspeed.megatron_adaptor  # noqa: F401  # isort: skip
    from gpt_step import build_step

    serve(build_step(), STEPS, warm_up=5)


def main():
    """Run both alternately, then print and record the ratio."""
    from record import record

    workers = {mode: Worker(__file__, "--worker", mode) for mode in ("plain", "adapted")}
    times = {mode: [] for mode in workers}
    for worker in workers.values():
        worker.warm_up()
    for _ in range(ROUNDS):
        for mode, worker in workers.items():
            times[mode].append(worker.measure()["seconds"])
    for worker in workers.values():
        worker.end()
    plain, adapted = (statistics.median(times[mode]) * 1e3 for mode in ("plain", "adapted"))
    print(f"plain {plain:.2f} ms, level 0 {adapted:.2f} ms, ratio {adapted / plain:.4f}")
    row = {"plain_ms": f"{plain:.3f}", "level0_ms": f"{adapted:.3f}"}
    record("adaptor_overhead", [row | {"ratio": f"{adapted / plain:.4f}"}])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worker", choices=("plain", "adapted"), help=argparse.SUPPRESS)
    mode = parser.parse_args().worker
    work(mode == "adapted") if mode else main()
