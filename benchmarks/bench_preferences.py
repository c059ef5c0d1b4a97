"""How long does a DPO step take next to TRL's DPOTrainer, and a rollout next to transformers?

    PYTHONPATH=/path/of/trl python benchmarks/bench_preferences.py [--shape smollm2] [--threads 2]

trl (and on a GPU liger-kernel) may be installed anywhere: `pip install --target ... --no-deps trl
datasets accelerate ...`. Two processes run alternately on the same weights and pairs: the steps of
`posttrain_gpt.py --stage dpo`, and those of TRL, on a GPU with Liger's fused DPO loss. Losses must
be equal, or there is no result. On a GPU: `--shape 1.5b --dtype bfloat16`, 4 pairs x 2048 tokens.

`--rollout` measures 64 x 256 new tokens instead, against `transformers.generate` with a static
cache.
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
ROUNDS, WARM, RATE = 5, 1, 1e-6
SIZES_1_5B = {
    "vocab_size": 49152,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
"""The layers of Qwen2.5-1.5B with the vocabulary of SmolLM2."""
SHAPES = {"smollm2": (2, 128), "1.5b": (4, 2048)}
"""Pairs in a step, and the tokens of each of their sequences."""
EOS = 2


def pairs(shape):
    """Return token ids of pairs (prompt, chosen, rejected), the same in both processes."""
    import numpy as np

    count, length = SHAPES[shape]
    generator = np.random.default_rng(0)
    drawn = generator.integers(3, 49152, (count * (ROUNDS + WARM), 3, length // 2)).tolist()
    return [(p, [*a[:-1], EOS], [*b[:-1], EOS]) for p, a, b in drawn]


def save_model(shape, folder):
    """Write the weights that both load."""
    from tests.llm.smollm2 import save_smollm2

    if shape == "smollm2":
        save_smollm2(folder)
        return
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES_1_5B, dtype="bfloat16")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def our_options(arguments, **more):
    """Return the options of a run of ours."""
    from mindspeed_llm.training.options import TrainOptions

    count, _ = SHAPES[arguments.shape]
    shared = {
        "load": f"{arguments.folder}/model",
        "no_shuffle": True,
        "train_iters": ROUNDS + WARM,
        "micro_batch_size": count,
        "lr": RATE,
        "lr_decay_style": "constant",
        "weight_decay": 0.0,
        "bf16": arguments.dtype == "bfloat16",
    }
    return TrainOptions(**shared | more)


def our_steps(arguments):
    """Run steps of ours, one for every line of standard input; yield the seconds and losses."""
    import mindspeed_llm.megatron_adaptor  # noqa: F401
    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from tests.llm.preferences import Pair, write_pairs

    workspace = Path(tempfile.mkdtemp(dir=arguments.folder))
    data = write_pairs(workspace / "data", [Pair(*each) for each in pairs(arguments.shape)])
    trainer = AutoTrainer(our_options(arguments, stage="dpo", data_path=(data,))).trainer
    trainer.start_prefetch()
    state = trainer.training.state
    for _ in sys.stdin:
        start = time.perf_counter()
        state, result = trainer.loop.step(trainer, state)
        yield time.perf_counter() - start, result.metrics["lm loss"]


def their_steps(arguments):
    """Run TRL's steps likewise."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    count, length = SHAPES[arguments.shape]
    is_gpu = torch.cuda.is_available()
    config = DPOConfig(
        arguments.folder,
        max_steps=ROUNDS + WARM,
        per_device_train_batch_size=count,
        max_length=length,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=not is_gpu,
        bf16=arguments.dtype == "bfloat16",
        gradient_checkpointing=False,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        use_liger_kernel=is_gpu,
    )

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            sys.stdin.readline()
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            if is_gpu:
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.start

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                print(json.dumps([self.seconds, logs["loss"]]), flush=True)

    def load():
        dtype = getattr(torch, arguments.dtype)
        return AutoModelForCausalLM.from_pretrained(f"{arguments.folder}/model", dtype=dtype)

    data = Dataset.from_list(
        [
            {"prompt": text(p), "chosen": text(a[:-1]), "rejected": text(b[:-1])}
            for p, a, b in pairs(arguments.shape)
        ]
    )
    words = tokenizer()
    trainer = DPOTrainer(load(), load(), config, train_dataset=data, processing_class=words)
    trainer.add_callback(Clock())
    trainer.train()
    return iter(())


def tokenizer():
    """Return a tokenizer of which every token is a number: TRL wants texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}.": i for i in range(49152)}, unk_token="t0."))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"t{EOS}.", pad_token="t0.")


def text(ids):
    """Return the text of tokens."""
    return "".join(f"t{i}. " for i in ids)


def work(arguments):
    """Time one step for every line on standard input."""
    import torch

    torch.set_num_threads(arguments.threads)
    for found in {"ours": our_steps, "theirs": their_steps}[arguments.worker](arguments):
        print(json.dumps(found), flush=True)


def start(name, folder, arguments):
    """Start one worker, which runs steps on request."""
    command = [sys.executable, __file__, "--worker", name, "--folder", folder]
    command += ["--threads", str(arguments.threads), "--shape", arguments.shape]
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        [*command, "--dtype", arguments.dtype],
        env=os.environ | {"OMP_NUM_THREADS": str(arguments.threads), "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def measure(process):
    """Let one worker run a step; return its seconds and its loss."""
    process.stdin.write("go\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("["):  # trainers print lines of their own
            return json.loads(line)
    sys.exit("a worker has ended")


def compare_steps(folder, arguments):
    """Run both alternately; return the row of results."""
    import trl

    workers = {name: start(name, folder, arguments) for name in ("ours", "theirs")}
    times = {name: [] for name in workers}
    tolerance = 1e-4 if arguments.dtype == "float32" else 2e-2
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
    count, length = SHAPES[arguments.shape]
    return {
        "what": "dpo step",
        "shape": arguments.shape,
        "size": f"{count} pairs x {length}",
        "threads": arguments.threads,
        "dtype": arguments.dtype,
        "ours_s": f"{ours:.3f}",
        "peer": f"trl {trl.__version__}",
        "peer_s": f"{theirs:.3f}",
        "ratio": f"{ours / theirs:.3f}",
    }


def compare_rollouts(folder, arguments):
    """Sample with both in this process, alternately; return the row of results."""
    import torch
    import transformers

    import mindspeed_llm.megatron_adaptor  # noqa: F401
    from mindspeed import device
    from mindspeed_llm.generation.rollout import Sampling
    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from tests.llm.letters import write_prompts

    torch.set_num_threads(arguments.threads)
    arguments.folder, (rows, new) = folder, arguments.rollout
    (Path(folder) / "none.py").write_text("def none(completions, **fields):\n    return []\n")
    words = tokenizer()
    words.save_pretrained(f"{folder}/model")
    data = write_prompts(Path(folder) / "data")
    more = {"stage": "grpo", "data_path": (data,), "reward_fn": f"{folder}/none.py:none"}
    options = our_options(arguments, **more, max_new_tokens=new)
    engine = AutoTrainer(options).trainer.engine
    sampling = Sampling(max_new_tokens=new, max_length=4096, stop_ids=frozenset())
    prompts = [[*range(3, 27)] for _ in range(rows)]
    here = device.current().torch_device
    dtype = getattr(torch, arguments.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=dtype)
    model = model.to(here).eval()
    given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "pad_token_id": 0}

    def theirs():
        with torch.no_grad():
            ids = torch.tensor(prompts, device=here)
            model.generate(ids, cache_implementation="static", **given).cpu()

    tools = {"ours": lambda: engine.generate(prompts, sampling, range(rows)), "theirs": theirs}
    seconds = {name: [] for name in tools}
    for _ in range(1 + WARM):
        for name, run in tools.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    ours, peer = (seconds[name][-1] for name in tools)
    return {
        "what": "rollout",
        "shape": arguments.shape,
        "size": f"{rows} x {new} tokens",
        "threads": arguments.threads,
        "dtype": arguments.dtype,
        "ours_s": f"{ours:.3f}",
        "peer": f"transformers {transformers.__version__}",
        "peer_s": f"{peer:.3f}",
        "ratio": f"{ours / peer:.3f}",
    }


def main(arguments):
    """Measure, then print and record."""
    sys.path.insert(0, str(ROOT))
    from record import record

    with tempfile.TemporaryDirectory() as folder:
        save_model(arguments.shape, Path(folder) / "model")
        compare = compare_rollouts if arguments.rollout else compare_steps
        row = compare(folder, arguments)
    print(row, flush=True)
    record("preferences", [row])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--rollout", type=int, nargs="*", metavar=("ROWS", "TOKENS"), help="default 64 256"
    )
    parser.add_argument("--worker", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rollout == []:
        arguments.rollout = [64, 256]
    work(arguments) if arguments.worker else main(arguments)
