"""A task with a verifiable answer for a model of a few letters: repeat the letter of the prompt."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.llm.preferences import write_columns

LETTERS = "abcd"
SPECIAL = ("<pad>", "<eos>", "<ask>")
EOS = 1
SCORE = '''
def repeats(prompts, completions, answer):
    """Return the share of four letters that repeat the answer."""
    return [text.count(right) / 4 for text, right in zip(completions, answer)]
'''


def save_model(folder: Path, kind: str = "LlamaForCausalLM", seed: int = 0, **changes: Any) -> str:
    """Save a random model and a tokenizer whose tokens are letters."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *LETTERS))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<ask>"
    )
    fast.save_pretrained(folder)
    sizes = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": None,  # transformers would drop the gradient of its embedding
        "bos_token_id": 2,
        "eos_token_id": EOS,
        "initializer_range": 0.1,
    }
    torch.manual_seed(seed)
    architecture = getattr(transformers, kind)
    architecture(architecture.config_class(**sizes | changes)).save_pretrained(folder)
    return str(folder)


def write_prompts(prefix: Path, count: int = 16, longest: int = 3) -> str:
    """Write prompts of different lengths that end with a letter, and the letter as the answer."""
    generator = np.random.default_rng(0)
    columns: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "fields": []}
    for number in range(count):
        letter = number % len(LETTERS)
        ids = [2] * int(generator.integers(1, longest + 1)) + [len(SPECIAL) + letter]
        columns["input_ids"].append(ids)
        columns["attention_mask"].append([1] * len(ids))
        columns["fields"].append(list(f'{{"answer": "{LETTERS[letter]}"}}'.encode()))
    return write_columns(prefix, columns)


def write_function(folder: Path, text: str = SCORE, name: str = "repeats") -> str:
    """Write a reward function; return it as --reward-fn takes it."""
    path = folder / f"{name}.py"
    path.write_text(text)
    return f"{path}:{name}"


def settings(model: str, data: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the options of a short run."""
    return {
        "stage": "grpo",
        "load": model,
        "data_path": (data,),
        "no_shuffle": True,
        "train_iters": 3,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "num_generations": 4,
        "max_new_tokens": 4,
        "lr": 1e-3,
        "lr_decay_style": "constant",
        "weight_decay": 0.0,
        "clip_grad": 1.0,
        "log_file": str(folder / "log.jsonl"),
    } | changes


def train(values: dict[str, Any]) -> None:
    """Train as one rank."""
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from mindspeed_llm.training.options import TrainOptions

    AutoTrainer(TrainOptions(**values)).train()
    parallel_state.destroy_model_parallel()


def read_log(values: dict[str, Any]) -> list[dict[str, float]]:
    """Return the lines of a run's log."""
    lines = map(json.loads, Path(values["log_file"]).read_text().splitlines())
    return [line for line in lines if "reward" in line]  # not those of the load of experts
