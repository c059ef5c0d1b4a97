"""A tiny llama and preferences about its tokens, the same whatever the versions of libraries are.

Weights and tokens are drawn by numpy, so that values recorded from another trainer stay valid.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_llm.data.indexed import TokenWriter

VOCABULARY, EOS = 99, 98
"""Odd, so that tensor parallelism pads it; two ranks have 50 tokens each."""
FIRST_OF_SHARD = 50
PLACEHOLDER, VERDICTS = 7, (FIRST_OF_SHARD, 3)
Solution = tuple[list[int], list[int]]
"""The ids and labels of a solution whose steps have verdicts."""
BATCH, KTO_BATCH, STEPS = 2, 4, 10
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": EOS,
}


class Pair(NamedTuple):
    """A prompt and two completions of it, as token ids."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def make_pairs(count: int = BATCH * STEPS, seed: int = 0) -> list[Pair]:
    """Return pairs of different lengths, whose completions hold the first token of a shard."""
    generator = np.random.default_rng(seed)

    def draw(least: int, most: int) -> list[int]:
        return generator.integers(1, EOS, int(generator.integers(least, most))).tolist()

    pairs = []
    for _ in range(count):
        prompt, chosen, rejected = draw(2, 6), draw(2, 12), draw(2, 12)
        pairs.append(Pair(prompt, [*chosen, FIRST_OF_SHARD, EOS], [*rejected, EOS]))
    return pairs


class Judged(NamedTuple):
    """A completion that is desirable or not."""

    prompt: list[int]
    completion: list[int]
    label: bool


def make_unpaired(count: int = KTO_BATCH * STEPS) -> list[Judged]:
    """Return completions of which most are desirable, so that the divergence is above 0."""
    pairs = make_pairs(count, seed=1)
    labels = (np.random.default_rng(2).random(count) < 0.85).tolist()
    return [Judged(p.prompt, p.chosen, label) for p, label in zip(pairs, labels)]


def make_steps(count: int) -> list[Solution]:
    """Return ids and labels of solutions; the last token is a placeholder with its verdict."""
    generator = np.random.default_rng(5)
    solutions = []
    for _ in range(count):
        ids, labels = [], []
        for _ in range(int(generator.integers(1, 4))):
            step = generator.integers(8, EOS, int(generator.integers(2, 6))).tolist()
            ids += [*step, PLACEHOLDER]
            labels += [-100] * len(step) + [VERDICTS[int(generator.integers(0, 2))]]
        solutions.append((ids, labels))
    return solutions


def save_llama(folder: Path, kind: str = "LlamaForCausalLM", seed: int = 0) -> str:
    """Save a random llama; `kind` is LlamaForCausalLM or LlamaForSequenceClassification."""
    import torch
    import transformers

    labels = {"num_labels": 1} if kind.endswith("SequenceClassification") else {}
    model = getattr(transformers, kind)(transformers.LlamaConfig(**SIZES, **labels))
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            values = torch.from_numpy(generator.standard_normal(weight.shape)).float()
            weight.copy_(1 + 0.1 * values if "norm" in name else 0.15 * values)
    model.save_pretrained(folder)
    return str(folder)


def write_pairs(prefix: Path, pairs: Sequence[Pair]) -> str:
    """Write pairs as preprocessing does."""
    columns: dict[str, list[list[int]]] = {}
    for pair in pairs:
        for side in ("chosen", "rejected"):
            completion = getattr(pair, side)
            ids, ignored = pair.prompt + completion, [-100] * len(pair.prompt)
            columns.setdefault(f"{side}_input_ids", []).append(ids)
            columns.setdefault(f"{side}_labels", []).append(ignored + completion)
    return write_columns(prefix, columns)


def write_unpaired(prefix: Path, samples: Sequence[Judged]) -> str:
    """Write unpaired completions as preprocessing does."""
    ids = [one.prompt + one.completion for one in samples]
    columns = {
        "input_ids": ids,
        "attention_mask": [[1] * len(row) for row in ids],
        "labels": [[-100] * len(one.prompt) + one.completion for one in samples],
        "desirable": [[int(one.label)] for one in samples],
    }
    return write_columns(prefix, columns)


def write_steps(prefix: Path, solutions: Sequence[Solution]) -> str:
    """Write solutions with verdicts as preprocessing does."""
    ids, labels = ([list(row) for row in rows] for rows in zip(*solutions))
    masks = [[1] * len(row) for row in ids]
    return write_columns(prefix, {"input_ids": ids, "attention_mask": masks, "labels": labels})


def write_columns(prefix: Path, columns: dict[str, list[list[int]]]) -> str:
    """Write files of tokens, one a column."""
    work = prefix.with_name(f"{prefix.name}.work")
    work.mkdir(parents=True)
    for key, rows in columns.items():
        writer = TokenWriter(work, key, np.dtype("<i4"))
        for row in rows:
            writer.append(np.array(row), np.array([len(row)]))
        writer.build_index(Path(f"{prefix}_packed_{key}_document.idx"))
        (work / f"{key}.bin").replace(f"{prefix}_packed_{key}_document.bin")
    return str(prefix)


def settings(model: str, data: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the options of a run that the recorded trainers repeat."""
    return {
        "load": model,
        "data_path": (data,),
        "no_shuffle": True,
        "train_iters": STEPS,
        "micro_batch_size": 1,
        "global_batch_size": BATCH,
        "lr": 1e-3,
        "lr_decay_style": "constant",
        "weight_decay": 0.0,
        "clip_grad": 0.0,
        "log_file": str(folder / "log.jsonl"),
    } | changes
