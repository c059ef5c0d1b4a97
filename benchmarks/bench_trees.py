"""Benchmark a training step of this tree against that of another commit, alternately.

    git worktree add /tmp/before 4df5461
    python benchmarks/bench_trees.py /tmp/before --shape llama3-8b --row ours:1
    python benchmarks/bench_trees.py /tmp/before --shape qwen3-30b-a3b --row ours-fused-experts:4 \\
        --row-before ours:4

Both run the rows of this tree's bench_train_step.py, in processes that take turns on the one
device. The speed is that of the median round.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

import bench_train_step
from record import record
from workers import Worker

ROOT = Path(__file__).resolve().parents[1]


def measure(trees, options):
    """Run the rows of both trees alternately; return the rounds of each."""
    script, rounds = bench_train_step.__file__, {name: [] for name in trees}
    workers = {
        name: Worker(script, "--shape", options.shape, "--worker", row, tree=folder)
        for name, (folder, row) in trees.items()
    }
    for name, worker in workers.items():
        if not worker.warm_up():
            sys.exit(f"{name} could not run here, see above")
    for _ in range(options.rounds):
        for name, worker in workers.items():
            rounds[name].append(worker.measure())
    for worker in workers.values():
        worker.end()
    return rounds


def _summarise(name, row, rounds, options):
    """Return the columns of one tree."""
    peer, _, batch = row.partition(":")
    tokens = int(batch) * bench_train_step.SHAPES[options.shape].sequence
    seconds = sorted(each["seconds"] for each in rounds)
    return {
        "shape": options.shape,
        "tree": name,
        "peer": peer,
        "micro_batch": batch,
        "tokens_per_s": f"{tokens / statistics.median(seconds):.0f}",
        "slowest": f"{tokens / seconds[-1]:.0f}",
        "fastest": f"{tokens / seconds[0]:.0f}",
        "peak_gib": f"{max(each['peak_gib'] for each in rounds):.2f}",
        "loss": f"{rounds[-1]['last']:.6f}",
    }


def _commit(folder):
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or folder.name


def main():
    """Parse the options, measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="a checkout of the other commit")
    parser.add_argument("--shape", choices=bench_train_step.SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--row", default="ours:2", metavar="PEER:BATCH")
    parser.add_argument("--row-before", metavar="PEER:BATCH", help="where it has another name")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if not (options.before / "mindspeed").is_dir():
        sys.exit(f"{options.before} has no folder mindspeed: give a checkout of another commit")
    if options.rounds < 1:
        sys.exit(f"--rounds {options.rounds}: give 1 or more")
    rows = options.row_before or options.row, options.row
    for flag, row in zip(("--row-before" if options.row_before else "--row", "--row"), rows):
        peer, _, batch = row.partition(":")
        if peer not in bench_train_step.PEERS or not batch.isdecimal() or not int(batch):
            sys.exit(f"{flag} {row}: use PEER:BATCH, PEER of {', '.join(bench_train_step.PEERS)}")
    try:
        options.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--results {options.results}: cannot be made ({error.strerror})")
    trees = {
        _commit(options.before): (options.before.resolve(), rows[0]),
        "this tree": (ROOT, rows[1]),
    }
    rounds = measure(trees, options)
    lines = [_summarise(name, trees[name][1], rounds[name], options) for name in trees]
    for line in lines:
        print("  ".join(f"{value:>20}" for value in line.values()))
    before, after = (float(line["tokens_per_s"]) for line in lines)
    print(f"this tree / {lines[0]['tree']}: {after / before:.4f}")
    record("trees", lines, options.results)


if __name__ == "__main__":
    main()
