"""Benchmark a training step against other training stacks.

    python benchmarks/bench_train_step.py
    python benchmarks/bench_train_step.py --only ours:2,torchtitan-compiled:2 --profile ours:2
    python benchmarks/bench_train_step.py --shape llama3-8b

Every row is a process of its own; they run alternately on the one device. All hold bf16 weights and
gradients, see the same tokens, and recompute nothing unless their name says so. A step is forward
and backward; with "optimizer" in the name it is Megatron's whole step: gradients summed in float32,
clipped, and AdamW on float32 weights. Peers whose package is missing are left out and named.
"""

import argparse
import functools
import importlib
import statistics
import sys
from pathlib import Path

from workers import Worker, serve

sys.path.insert(0, str(Path(__file__).parent / "train_step"))
from shapes import SHAPES  # noqa: E402

PEERS = {
    "megatron": "megatron_peer:plain",
    "megatron-recompute": "megatron_peer:recompute",
    "megatron-liger": "megatron_peer:liger",
    "transformers": "transformers_peer:sdpa",
    "transformers-compiled": "transformers_peer:compiled",
    "transformers-liger": "transformers_peer:liger",
    "torchtitan": "torchtitan_peer:eager",
    "torchtitan-compiled": "torchtitan_peer:compiled",
    "ours": "megatron_peer:ours",
    "ours-deterministic": "megatron_peer:deterministic",
    "ours-swiglu-apart": "megatron_peer:swiglu_apart",
    "ours-fused-experts": "megatron_peer:fused_experts",
    "ours-fused-experts-deterministic": "megatron_peer:fused_experts_deterministic",
    "ours-experts-apart": "megatron_peer:experts_apart",
    "ours-router-apart": "megatron_peer:router_apart",
    "megatron-liger-optimizer": "megatron_peer:liger_with_optimizer",
    "ours-optimizer": "megatron_peer:ours_with_optimizer",
}
ROWS = {
    "qwen2.5-1.5b": "megatron:2,megatron-recompute:2,megatron-liger:2,transformers:2,"
    "transformers-compiled:2,transformers-liger:2,transformers-liger:4,torchtitan:2,"
    "torchtitan-compiled:2,torchtitan-compiled:4,ours:2,ours:4,ours-deterministic:2,"
    "megatron-liger-optimizer:2,ours-optimizer:2",
    "llama3-8b": "torchtitan-compiled:1,ours:1",
    "qwen3-30b-a3b": "torchtitan-compiled:4,ours-experts-apart:4,ours-router-apart:4,"
    "ours-fused-experts:4,ours-fused-experts-deterministic:4",
    "tiny": "ours:2",
}
STEPS, WARM_UP = 8, 3  # a block starts with an empty queue: few steps would show its launches


def build(peer, shape, batch):
    """Return the train step of one peer, which returns its loss."""
    import torch

    module, _, name = PEERS[peer].partition(":")
    torch.manual_seed(1)
    model, loss, *update = getattr(importlib.import_module(module), name)(shape)
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(shape.vocabulary, (batch, shape.sequence + 1), generator=generator)
    tokens, labels = drawn[:, :-1].contiguous().cuda(), drawn[:, 1:].contiguous().cuda()

    def step():
        value = loss(tokens, labels)
        value.backward()
        if update:
            update[0]()
        else:
            for parameter in model.parameters():  # the next step starts from none
                parameter.grad = None
        return value.detach()

    return step


def work(row, options):
    """Run the worker process of one row."""
    peer, _, batch = row.partition(":")
    step = build(peer, SHAPES[options.shape], int(batch))
    on_warm = None
    if options.profile == row:
        from timeline import write_profile

        on_warm = functools.partial(write_profile, f"profile_{row.replace(':', '_')}.txt")
    serve(step, STEPS, WARM_UP, on_warm)


def measure(options):
    """Start all rows, warm each up, then run them alternately."""
    own = [__file__, "--shape", options.shape, "--profile", options.profile or ""]
    rows = {row: Worker(*own, "--worker", row) for row in _names(options)}
    # Compilation takes minutes and little of the device: these warm up together.
    compiled = [row for row in rows if "compiled" in row]
    for batch in (compiled, *([row] for row in rows if row not in compiled)):
        for row in batch:
            rows[row].begin()
        for row in batch:
            if not rows[row].has_begun():
                _leave_out(row, rows)
    answers = {row: [] for row in rows}
    try:
        for _ in range(options.rounds):
            _measure_round(rows, answers)
    except KeyboardInterrupt:
        print("interrupted: the table shows the rounds so far", flush=True)
    for worker in rows.values():
        worker.end()
    return {row: rounds for row, rounds in answers.items() if rounds}


def _measure_round(rows, answers):
    for row in list(rows):
        answer = rows[row].measure()
        if answer is None:
            del answers[row]
            _leave_out(row, rows)
        else:
            answers[row].append(answer)


def _leave_out(row, rows):
    print(f"{row} is left out: it could not run here, see above", flush=True)
    rows.pop(row).end()


def report(answers, options):
    """Print the table and append it to the results."""
    import roofline
    from record import record

    shape = SHAPES[options.shape]
    rooflines = {}
    lines = []
    for row, rounds in answers.items():
        peer, _, batch = row.partition(":")
        seconds = sorted(each["seconds"] for each in rounds)
        median = statistics.median(seconds)
        tokens = int(batch) * shape.sequence
        if batch not in rooflines:
            clocks = (roofline.short, roofline.sustained)
            parts = [roofline.roofline(shape, int(batch), clock) for clock in clocks]
            print(f"roofline at micro-batch {batch}: {_milliseconds(parts[0])}")
            print(f"  sustained: {_milliseconds(parts[1])}", flush=True)
            rooflines[batch] = [sum(part.values()) for part in parts]
        lines.append(
            {
                "shape": options.shape,
                "peer": peer,
                "micro_batch": batch,
                "tokens_per_s": f"{tokens / median:.0f}",
                "slowest": f"{tokens / seconds[-1]:.0f}",
                "fastest": f"{tokens / seconds[0]:.0f}",
                "model_tflops": f"{tokens / median * shape.flops_per_token / 1e12:.0f}",
                "peak_gib": f"{max(each['peak_gib'] for each in rounds):.1f}",
                "roofline_ratio": f"{rooflines[batch][0] / median:.3f}",
                "sustained_ratio": f"{rooflines[batch][1] / median:.3f}",
                "loss": f"{rounds[-1]['last']:.3f}",
            }
        )
    for line in lines:
        print("  ".join(f"{value:>22}" for value in line.values()))
    record("train_step", lines)


def _names(options):
    return (options.only or ROWS[options.shape]).split(",")


def _milliseconds(parts):
    return ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in parts.items())


def _has_cuda():
    import torch

    return torch.cuda.is_available()


def main():
    """Parse the options; run the driver or one worker."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument(
        "--only", default="", metavar="PEER:BATCH,...", help=f"of {', '.join(PEERS)}"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--profile", metavar="PEER:BATCH", help="write profile_PEER_BATCH.txt")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.worker, options)
    if not _has_cuda():
        sys.exit("bench_train_step.py measures on a CUDA device, and torch sees none here")
    unknown = {row.partition(":")[0] for row in _names(options)} - set(PEERS)
    if unknown:
        sys.exit(f"--only names {', '.join(unknown)}: use {', '.join(PEERS)}, each with :BATCH")
    report(measure(options), options)


if __name__ == "__main__":
    main()
