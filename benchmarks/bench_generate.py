"""How many tokens a second does decoding make, next to transformers.generate?

    python benchmarks/bench_generate.py [--threads 1 2] [--tokens 64] [--rounds 5]
    python benchmarks/bench_generate.py --rollout [--shapes smollm2 1.5B] [--rows 64] [--tokens 256]
        [--no-uncompiled]

The first compares greedy decoding of one prompt in float32 on a cpu, SmolLM2-135M, both in this
process, alternately. The tokens must be equal, or there is no result. Seconds are those of the
best round.

--rollout samples 64 x 256 tokens at random weights in bf16: our engine, and `transformers.generate`
with a static cache, compiled as it is by default, and not compiled unless --no-uncompiled leaves
that out. The first round of each is not measured.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMPT = (1, 4093, 198, 10576, 4150, 260, 1238, 24630, 28, 284, 281, 527)
PROMPT += (713, 436, 357, 808, 4940, 47, 2, 198, 1, 520, 9531, 198)
SHAPES = {"smollm2": "smollm2-135m", "1.5B": "qwen2.5-1.5b", "tiny": "tiny"}
TRANSFORMERS = ("transformers.generate", "transformers.generate, not compiled")
ENOUGH = 4.0
"""Seconds of measured rounds after which a tool is not run again."""


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


def greedy(args):
    """Measure greedy decoding with every number of threads; return the rows."""
    import torch

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
    return rows


def rollout_tools(folder, args):
    """Return functions that sample completions of the same prompts, by the name of the tool."""
    import torch
    import transformers

    from mindspeed import device
    from mindspeed_llm.generation.engine import Engine, Request
    from mindspeed_llm.generation.model import load_model
    from mindspeed_llm.generation.sampling import SamplingParams
    from mindspeed_llm.training.options import TrainOptions

    engine = Engine(load_model(TrainOptions(load=str(folder), bf16=True)))
    vocabulary = engine._model.config.vocab_size
    prompts = torch.randint(0, vocabulary, (args.rows, args.prompt)).tolist()
    request = Request(
        prompts=tuple(map(tuple, prompts)),
        max_new_tokens=(args.tokens,) * args.rows,
        stop_ids=frozenset(),
        params=SamplingParams(sample=True, seed=1),
        log_probs=True,
    )
    here = device.current().torch_device
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model, ids = model.to(here).eval(), torch.tensor(prompts, device=here)
    lengths = {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens}

    def ours():
        return sum(len(step) for step in engine.generate(request))

    def theirs(**options):
        options |= {"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}
        mask = torch.ones_like(ids)
        with torch.no_grad():
            found = model.generate(
                ids, attention_mask=mask, cache_implementation="static", **lengths, **options
            )
        return found[:, args.prompt :].cpu().numel()

    compiled, plain = TRANSFORMERS
    tools = {"mindspeed-llm": ours, compiled: theirs}
    if not args.no_uncompiled:
        tools[plain] = lambda: theirs(disable_compile=True)
    return tools


def rollouts(args):
    """Measure sampling of many rows at every shape; return the rows of results."""
    from commands import data
    from train_step.shapes import SHAPES as SIZES

    rows = []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            data.write_model(SIZES[SHAPES[shape]], model)
            data.write_random_weights(model)
            found = {}
            for tool, run in rollout_tools(model, args).items():
                first, best = found[tool] = time_rounds(run, args.rounds, args.rows * args.tokens)
                print(
                    f"{shape} {tool:36} {args.rows * args.tokens / best:9.1f} tokens/s, "
                    f"{1000 * best / args.tokens:7.3f} ms a step (first round {first:.1f} s)",
                    flush=True,
                )
        for tool, (first, best) in found.items():
            times = [found[other][1] / best if other in found else None for other in TRANSFORMERS]
            rows.append(
                {
                    "tool": tool,
                    "shape": shape,
                    "size": f"{args.rows} x {args.tokens}",
                    "tokens_per_s": round(args.rows * args.tokens / best, 1),
                    "ms_per_token": round(1000 * best / args.tokens, 3),
                    "first_round_s": round(first, 2),
                    "times_transformers": round(times[0], 3),
                    "times_not_compiled": "" if times[1] is None else round(times[1], 3),
                }
            )
            others = " and ".join(f"{x:.2f} x" for x in times if x is not None)
            print(f"{shape} {tool:36} {others} transformers", flush=True)
    return rows


def time_rounds(run, rounds, expected):
    """Return the seconds of the first round and of the best other one."""
    seconds = []
    while len(seconds) < 1 + rounds:
        start = time.perf_counter()
        count = run()
        seconds.append(time.perf_counter() - start)
        if count != expected:
            sys.exit(f"{count} tokens were sampled, {expected} were asked for")
        if sum(seconds[1:]) > ENOUGH:
            break
    return seconds[0], min(seconds[1:])


def main():
    """Measure, then print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--rollout", action="store_true")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["smollm2", "1.5B"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument(
        "--no-uncompiled", action="store_true", help="leave out transformers without torch.compile"
    )
    args = parser.parse_args()
    args.tokens = args.tokens or (256 if args.rollout else 64)
    args.rounds = args.rounds or (3 if args.rollout else 5)
    sys.path.insert(0, str(ROOT))
    from mindspeed_llm import megatron_adaptor  # noqa: F401  # before anything of Megatron

    rows = rollouts(args) if args.rollout else greedy(args)
    from record import record

    record("generate", rows)


if __name__ == "__main__":
    main()
