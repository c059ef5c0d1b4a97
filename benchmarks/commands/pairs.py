"""Rows on pairs of answers: `posttrain_gpt.py --stage dpo` and TRL's DPOTrainer.

All of them train the same weights on the same pairs: random ones, those of SmolLM2 where that is
the shape. A sequence has half the tokens of the shape's: 2048 at 1.5B. Tokens are those of both
sequences of a pair, also where their common prompt is computed once.
"""

import json
import subprocess
import sys
from pathlib import Path

from commands import data
from commands.job import ROOT, Case, Command

RATE = ["--lr", "1e-6", "--lr-decay-style", "constant", "--weight-decay", "0"]
SHAPES = ("1.5B", "smollm2", "tiny")
SCRIPT = Path(__file__).resolve().parent / "trl_dpo.py"


def dpo(job, batch, *flags):
    """Build our command; a step has one micro-batch of pairs."""
    folder = _prepare(job, batch)
    argv = [
        *(sys.executable, str(ROOT / "posttrain_gpt.py"), "--stage", "dpo"),
        *("--load", str(folder / "model"), "--data-path", str(folder / "data"), "--no-shuffle"),
        *("--micro-batch-size", str(batch), "--global-batch-size", str(batch)),
        *("--train-iters", str(job.steps), *RATE),
        *([] if job.is_fp32 else ["--bf16"]),
    ]
    return Command([*argv, *flags], "megatron", global_batch=batch)


def dpo_unshared(job, batch):
    """Build it with the prompt of a pair computed for each sequence."""
    return dpo(job, batch, "--no-share-prompts")


def trl_dpo(job, batch, *flags):
    """Build a script with TRL's DPOTrainer, its fused output layer and Liger's layer kernels."""
    folder = _prepare(job, batch)
    argv = [
        *(sys.executable, str(SCRIPT), "--model", str(folder / "model")),
        *("--data", str(folder / "pairs.jsonl"), "--steps", str(job.steps)),
        *("--length", str(job.shape.sequence // 2), "--attention", job.attention),
        *("--micro-batch", str(batch), "--global-batch", str(batch)),
        *("--output", str(folder / "output"), *(["--fp32"] if job.is_fp32 else []), *flags),
    ]
    return Command(
        argv,
        "json",
        {"LOCAL_RANK": "-1"},  # not wrapped for several ranks, which would hold gradients twice
        global_batch=batch,
        site="peers",
        packages=("trl", "transformers", "liger-kernel", "accelerate"),
    )


def trl_dpo_liger(job, batch):
    """Build it with Liger's fused DPO loss, as TRL had it before it got an output layer of its own.

    TRL 1.16 has no switch for that loss any more.
    """
    return trl_dpo(job, batch, "--liger-loss")


def _prepare(job, batch):
    """Write weights, tokenizer and pairs, unless there are enough pairs for the steps already."""
    folder = job.folder / f"pairs_{job.prompt_share:g}"
    done = folder / "prepared.json"
    length, count = job.shape.sequence // 2, batch * (job.steps + 2)
    if done.is_file() and json.loads(done.read_text()) >= count:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(job, folder / "model")
    _write_pairs(job, folder / "pairs.jsonl", length, count)
    command = [
        *(sys.executable, str(ROOT / "preprocess_data.py"), "--input", str(folder / "pairs.jsonl")),
        *("--tokenizer-name-or-path", str(folder / "model"), "--seq-length", str(length)),
        *("--handler-name", "AlpacaStylePairwiseHandler", "--prompt-type", "tokenizer"),
        *("--output-prefix", str(folder / "data")),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    done.write_text(json.dumps(count))
    return folder


def _write_weights(job, folder):
    if job.shape_name == "smollm2":
        from tests.llm.smollm2 import save_smollm2

        save_smollm2(folder)
        data.tokenizer(job.shape.vocabulary).save_pretrained(folder)
    else:
        data.write_model(job.shape, folder)
        data.write_random_weights(folder)


def _write_pairs(job, path, length, count):
    """Write pairs with a common prompt, of which both sequences have the same length."""
    vocabulary = job.shape.vocabulary
    text, words = data.Text(vocabulary, seed=4), data.tokenizer(vocabulary)
    turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    template = len(words(words.apply_chat_template(turns, tokenize=False))["input_ids"])
    asked = round(length * job.prompt_share)
    answered = length - asked - template
    with path.open("w") as file:
        for _ in range(count):
            record = {
                "instruction": text.draw(asked),
                "input": "",
                "chosen": text.draw(answered),
                "rejected": text.draw(answered),
            }
            file.write(json.dumps(record) + "\n")


CASES = {
    "dpo": Case(dpo, "posttrain_gpt.py --stage dpo", (4,), SHAPES),
    "dpo-unshared": Case(dpo_unshared, "the same with --no-share-prompts", (4,), SHAPES),
    "trl-dpo": Case(trl_dpo, "TRL DPOTrainer + Liger's layer kernels", (4,), SHAPES),
    "trl-dpo-liger": Case(trl_dpo_liger, "the same with Liger's fused DPO loss", (4,), SHAPES),
}
