"""How many tokens a second does greedy decoding make, next to transformers.generate?

    python benchmarks/bench_generate.py [--threads 1 2] [--tokens 64] [--rounds 5]

SmolLM2-135M in float32 on the cpu, one prompt of 24 tokens, both in this process, alternately. The
tokens must be equal, or there is no result. Seconds are those of the best round.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROMPT = (1, 4093, 198, 10576, 4150, 260, 1238, 24630, 28, 284, 281, 527)
PROMPT += (713, 436, 357, 808, 4940, 47, 2, 198, 1, 520, 9531, 198)


def load(folder):
    """Load the model twice: ours, and that of transformers."""
    import torch
    import transformers

    from mindspeed_llm.generation.engine import Engine
    from mindspeed_llm.generation.model import load_model
    from mindspeed_llm.training.options import TrainOptions
    from tests.llm.smollm2 import save_smollm2

    save_smollm2(folder)
    engine = Engine(load_model(TrainOptions(load=str(folder))))
    return engine, transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()


def compare(engine, model, tokens, rounds):
    """Run both alternately; return the minimum seconds of each."""
    from tests.llm.generation import collect, request, theirs

    tools = {
        "mindspeed-llm": lambda: collect(engine, request([PROMPT], tokens)),
        "transformers.generate": lambda: theirs(model, [PROMPT], tokens),
    }
    seconds, answers = {tool: [] for tool in tools}, []
    for _ in range(rounds):
        for tool, run in tools.items():
            start = time.perf_counter()
            answers.append(run())
            seconds[tool].append(time.perf_counter() - start)
    if any(answer != answers[0] for answer in answers):
        sys.exit("the tokens differ")
    return {tool: min(times) for tool, times in seconds.items()}


def main():
    """Measure with every number of threads, then print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import torch

    from mindspeed_llm import megatron_adaptor  # noqa: F401  # before anything of Megatron

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        engine, model = load(Path(folder))
        for threads in args.threads:
            torch.set_num_threads(threads)
            seconds = compare(engine, model, args.tokens, args.rounds)
            for tool, time_ in seconds.items():
                ratio = seconds["transformers.generate"] / time_
                speed = args.tokens / time_
                rows.append(
                    {
                        "tool": tool,
                        "threads": threads,
                        "tokens_per_s": round(speed, 2),
                        "times_transformers": round(ratio, 3),
                    }
                )
                print(f"{threads} thread(s) {tool:22} {speed:6.1f} tokens/s, {ratio:.2f} x")
    from record import record

    record("generate", rows)


if __name__ == "__main__":
    main()
