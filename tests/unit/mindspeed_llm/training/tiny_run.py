"""A tiny llama, tiny data, and runs on them: ours, and a plain loop of transformers and torch."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_llm.data.indexed import TokenWriter

VOCABULARY = 99  # odd: tensor parallelism has to pad it
RATE, DECAY, CLIP = 1e-3, 0.1, 0.5
Sample = tuple[np.ndarray, np.ndarray]


def make_model(folder: Path, **changes: Any) -> str:
    """Save a random llama in Hugging Face's format."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
    }
    config = LlamaConfig(**sizes | changes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_mixtral(folder: Path, **changes: Any) -> str:
    """Save a random mixture of experts in Hugging Face's format."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
    }
    MixtralForCausalLM(MixtralConfig(**sizes | changes)).save_pretrained(folder)
    return str(folder)


def make_samples(count: int, seed: int = 0) -> list[Sample]:
    """Return ids and labels of samples of different lengths; the first third is masked."""
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        ids = generator.integers(0, VOCABULARY, int(generator.integers(6, 24)))
        labels = ids.copy()
        labels[: len(ids) // 3] = -100
        samples.append((ids, labels))
    return samples


def write_samples(prefix: Path, samples: list[Sample], rows: list[list[int]] | None = None) -> str:
    """Write samples as preprocessing does, several in a row (neatly) where `rows` says so."""
    work = prefix.with_name(f"{prefix.name}.work")
    work.mkdir(parents=True)
    length = 0 if rows is None else max(sum(len(samples[i][0]) for i in row) for row in rows) + 3
    for key in ("input_ids", "attention_mask", "labels"):
        writer = TokenWriter(work, key, np.dtype("<i4"))
        for row in rows or [[number] for number in range(len(samples))]:
            tokens = np.concatenate([_values(key, n, samples[i]) for n, i in enumerate(row, 1)])
            padding = {"input_ids": 5, "attention_mask": 0, "labels": -100}[key]
            tokens = np.append(tokens, [padding] * max(0, length - len(tokens)))
            writer.append(tokens, np.array([len(tokens)]))
        writer.build_index(Path(f"{prefix}_packed_{key}_document.idx"))
        (work / f"{key}.bin").replace(f"{prefix}_packed_{key}_document.bin")
    return str(prefix)


def _values(key: str, number: int, sample: Sample) -> np.ndarray:
    ids, labels = sample
    return {"input_ids": ids, "labels": labels, "attention_mask": np.full(len(ids), number)}[key]


def settings(model: str, data: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the options of a run that the plain loop repeats."""
    return {
        "load": model,
        "data_path": (data,),
        "no_shuffle": True,
        "train_iters": 20,
        "global_batch_size": 4,
        "lr": RATE,
        "lr_decay_style": "constant",
        "weight_decay": DECAY,
        "clip_grad": CLIP,
        "log_file": str(folder / "log.jsonl"),
    } | changes


def train(values: dict[str, Any]) -> list[float]:
    """Train as one rank and return the losses of all steps."""
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from mindspeed_llm.training.options import TrainOptions

    AutoTrainer(TrainOptions(**values)).train()
    parallel_state.destroy_model_parallel()
    return read_losses(values["log_file"])


OWN_REFERENCE = "reference: the policy without its adapters (--ref-model: another model)"


def log_of_references(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Start runs, one after the other, as one rank; return what each logs of its reference."""
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from mindspeed_llm.training.options import TrainOptions

    lines: list[list[str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines[-1].append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mindspeed_llm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for values in runs:
        lines.append([])
        AutoTrainer(TrainOptions(**values))
        parallel_state.destroy_model_parallel()
    return [[line for line in each if line.startswith("reference: ")] for each in lines]


def read_losses(log_file: str, name: str = "lm loss") -> list[float]:
    """Return the losses in a log, which may have lines of its own for the load of experts."""
    lines = map(json.loads, Path(log_file).read_text().splitlines())
    return [line[name] for line in lines if name in line]


def read_checkpoint(saved: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the newest checkpoint, those of the optimizer included."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    from mindspeed.checkpoint.dcp_metadata import read_dcp_tensors
    from mindspeed.checkpoint.detection import detect

    folder = detect(saved).folder
    tensors = {n: torch.empty(t.shape) for n, t in read_dcp_tensors(folder).items()}
    load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return tensors


def plain_loop(model: str, samples: list[Sample], steps: int, batch: int) -> tuple[list, Any]:
    """Train with transformers and torch only; return the losses and the trained model."""
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    named = list(llama.named_parameters())
    # Biases of all experts are one matrix here.
    decayed = [p for name, p in named if p.ndim > 1 and not name.endswith("_bias")]
    others = [p for name, p in named if p.ndim == 1 or name.endswith("_bias")]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    losses = []
    for step in range(steps):
        total = 0.0
        for place in range(step * batch, (step + 1) * batch):
            ids, labels = (torch.tensor(x)[None] for x in samples[place % len(samples)])
            loss = llama(input_ids=ids, labels=labels).loss / batch
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, llama
