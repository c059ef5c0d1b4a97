"""ms-swift: its `megatron sft` trains, saves and exports as transformers and our trainer do."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed.launch import call
from tests.clients import tiny_models
from tests.clients.cases import Case, OwnFailure
from tests.unit.mindspeed_llm.training.tiny_run import Sample, train, write_samples

LIMIT = 1e-5
STEPS, BATCH = 3, 4
RATE, DECAY, CLIP, EPS = 1e-3, 0.1, 1.0, 1e-4
"""A large epsilon: without it Adam turns the rounding of a tiny gradient into a whole step."""
RANK, ALPHA, SPREAD = 4, 8, 0.05
PATIENCE = 600.0
# Before anything of Megatron, as in the script that the page shows.
PRELOAD = ("mindspeed.megatron_adaptor", "swift.megatron.pipelines", "swift.megatron.trainers")

SCRIPT = """
import mindspeed.megatron_adaptor
from swift.megatron import megatron_sft_main

if __name__ == "__main__":
    megatron_sft_main()
"""

OWN = [
    OwnFailure(
        "qwen3",
        "--torch_dtype float32",
        "found NaN in local grad norm",
        "swift/arguments/base_args/model_args.py:133 makes it fp16, where the first loss scale "
        "(2**32) overflows and swift/megatron/utils/megatron_lm_utils.py:674 stops: --fp16 false",
    ),
    OwnFailure(
        "qwen3",
        "TP 2 by default",
        "differ by",
        "without --perform_initialization megatron/core/tensor_parallel/layers.py:265 and 877 "
        "mark no shards of the vocabulary, and the norm that clips the gradient misses them",
    ),
]


@dataclass(frozen=True)
class Layout:
    """Ranks, and the flags with which ms-swift shares the model among them."""

    name: str
    world: int = 1
    flags: str = ""


ALONE = Layout("1 rank")
LAYOUTS = (
    ALONE,
    Layout("TP 2", 2, "--tensor_model_parallel_size 2 --sequence_parallel true"),
    Layout("PP 2", 2, "--pipeline_model_parallel_size 2"),
    Layout("EP 2", 2, "--expert_model_parallel_size 2"),
)
PURE = "--torch_dtype float32 --fp16 false --bf16 false"
# Without the last flag the norm of the gradient misses a part of the vocabulary, see OWN.
FP32 = f"{PURE} --perform_initialization true"
BF16 = "--torch_dtype bfloat16"


class Subject:
    """A tiny model with its tokenizer, and conversations to train it on."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.model = tiny_models.save(name, folder)
        tokenizer = _tokenizer()
        tokenizer.save_pretrained(self.model)
        self.samples: list[Sample] = []
        lines = []
        for question, answer in _conversations():
            turns = [{"role": "user", "content": question}]
            lines.append(
                json.dumps({"messages": [*turns, {"role": "assistant", "content": answer}]})
            )
            start = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            ids = np.array(tokenizer.encode(f"{start}{answer}<|im_end|>\n"))
            prompt = len(tokenizer.encode(start))
            labels = np.where(np.arange(len(ids)) < prompt, -100, ids)
            self.samples.append((ids, labels))
        self.data = folder / "chats.jsonl"
        self.data.write_text("\n".join(lines))

    def flags(self, layout: Layout, dtype: str, more: str = "") -> list[str]:
        """Return the command line of ms-swift that every run begins with."""
        text = f"""
            --model {self.model} --model_type {self.name} --template chatml
            --dataset {self.data} --dataset_shuffle false --train_dataloader_shuffle false
            --split_dataset_ratio 0 --dataset_num_proc 1 --dataloader_num_workers 0
            --train_iters {STEPS} --micro_batch_size 1 --global_batch_size {BATCH} --max_length 64
            --lr {RATE} --lr_decay_style constant --weight_decay {DECAY} --clip_grad {CLIP}
            --adam_eps {EPS} --logging_steps 1 --save_steps {STEPS} --check_model false
            --output_dir {self.folder / "out"} --add_version false {dtype} {layout.flags} {more}
        """
        return text.split()

    def swift(self, layout: Layout, dtype: str, more: str = "") -> tuple[list[float], Path]:
        """Train with ms-swift; return the losses and the folder of the checkpoint."""
        flags = self.flags(layout, dtype, more)
        call(_sft, layout.world, flags, timeout=PATIENCE, preload=PRELOAD)
        return self.losses(), self.folder / "out" / f"checkpoint-{STEPS}"

    def losses(self) -> list[float]:
        """Return the losses that ms-swift has logged."""
        log = (self.folder / "out" / "logging.jsonl").read_text().splitlines()
        return [line["loss"] for line in map(json.loads, log) if "loss" in line]


def _sft(flags: list[str]) -> None:
    from swift.megatron import megatron_sft_main

    torch.set_num_threads(1)
    megatron_sft_main(flags)


def _export(flags: list[str]) -> None:
    from swift.megatron import megatron_export_main

    torch.set_num_threads(1)
    megatron_export_main(flags)


def full(name: str, layout: Layout, folder: Path, dtype: str = FP32) -> str:
    """Train every weight in float32: losses and exported weights are those of transformers."""
    subject = Subject(name, folder)
    losses, saved = subject.swift(layout, dtype)
    model = _reference(subject)
    far = _far(losses, _train(model, subject.samples))
    weights = _same(_read(saved / "model.safetensors"), _saved(model, folder))
    assert (saved / f"iter_{STEPS:07}").is_dir(), "no checkpoint of Megatron beside the weights"
    return f"losses {far:.0e}, exported weights {weights:.0e}"


def export(name: str, layout: Layout, folder: Path) -> str:
    """Turn the checkpoint of Megatron into one of transformers with `megatron export`."""
    subject = Subject(name, folder)
    _, saved = subject.swift(layout, FP32)
    flags = f"--mcore_model {saved} --to_hf true --output_dir {folder / 'hf'} {FP32} {layout.flags}"
    call(_export, layout.world, flags.split(), timeout=PATIENCE, preload=PRELOAD)
    file = "model.safetensors"
    _same(_read(folder / "hf" / file), _read(saved / file), 0.0)
    return "megatron export: bit-equal to the weights that training wrote"


def command(name: str, layout: Layout, folder: Path) -> str:
    """Run the script that the page shows, as the user does."""
    subject = Subject(name, folder)
    script = folder / "sft.py"
    script.write_text(SCRIPT)
    ranks = [sys.executable, "-m", "mindspeed", "run", "--nproc", str(layout.world)]
    flags = subject.flags(layout, FP32)
    done = subprocess.run([*ranks, str(script), *flags], stdout=sys.stderr, timeout=PATIENCE)
    assert done.returncode == 0, f"exit code {done.returncode}"
    far = _far(subject.losses(), _train(_reference(subject), subject.samples))
    return f"losses {far:.0e}"


def bf16(name: str, layout: Layout, folder: Path) -> str:
    """Train in bfloat16: the losses are those of our trainer, in the same format of numbers."""
    subject = Subject(name, folder)
    losses, saved = subject.swift(layout, BF16)
    far = _far(losses, _ours(subject, bf16=True))
    assert all(each.dtype == torch.bfloat16 for each in _read(saved / "model.safetensors").values())
    return f"losses {far:.0e} from our trainer's"


def ours(name: str, layout: Layout, folder: Path) -> str:
    """Train the same in float32 with our trainer."""
    subject = Subject(name, folder)
    losses, _ = subject.swift(layout, FP32)
    return f"losses {_far(losses, _ours(subject)):.0e} from our trainer's"


def lora(name: str, layout: Layout, folder: Path) -> str:
    """Train adapters: losses, adapters and merged weights are those of peft on transformers."""
    subject = Subject(name, folder)
    model = _adapted(_reference(subject), name)
    start = folder / "start"
    model.save_pretrained(start)
    targets = "linear_qkv linear_proj" if name in tiny_models.SPARSE else "all-linear"
    more = f"--tuner_type lora --adapters {start} --target_modules {targets} --lora_dropout 0"
    losses, saved = subject.swift(layout, FP32, f"{more} --merge_lora false")
    far = _far(losses, _train(model, subject.samples))
    model.save_pretrained(folder / "end")
    file = "adapter_model.safetensors"
    weights = _same(_read(saved / file), _read(folder / "end" / file))
    return f"losses {far:.0e}, exported adapters {weights:.0e}"


def float16(name: str, layout: Layout, folder: Path) -> str:
    """Ask for float32 as the command line suggests, with --torch_dtype alone."""
    losses, _ = Subject(name, folder).swift(layout, "--torch_dtype float32")
    return f"losses {losses}"


def _far(losses: list[float], expected: list[float]) -> float:
    assert len(losses) == STEPS and all(map(math.isfinite, losses)), f"losses {losses}"
    far = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    assert far <= LIMIT, f"losses {losses} differ by {far:.1e} from {expected}"
    return far


def _same(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float = LIMIT
) -> float:
    only = found.keys() ^ expected.keys()
    assert not only, f"exported: only one side has {sorted(only)[:4]}"
    furthest = 0.0
    for name, values in expected.items():
        far = (found[name].float() - values.float()).abs().max().item()
        assert far <= limit, f"exported: {name} differs by {far:.1e}"
        furthest = max(furthest, far)
    return furthest


def _read(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def _saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder / "expected")
    return _read(folder / "expected" / "model.safetensors")


def _reference(subject: Subject) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(subject.model, dtype=torch.float32).train()


def _train(model: Any, samples: list[Sample]) -> list[float]:
    """Train with transformers and torch: the loss of a step is the mean over all its tokens."""
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": DECAY},
        {"params": [each for each in trained if each.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPS)
    losses = []
    for step in range(STEPS):
        batch = samples[step * BATCH : (step + 1) * BATCH]
        tokens = sum(int((labels != -100).sum()) for _, labels in batch)
        total = 0.0
        for ids, labels in batch:
            logits = model(input_ids=torch.tensor(ids)[None]).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits, torch.tensor(labels)[1:], reduction="sum"
            )
            (loss / tokens).backward()
            total += loss.item() / tokens
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _adapted(model: Any, name: str) -> Any:
    """Return the model with adapters as Megatron has them.

    Its linear_qkv is one layer with one adapter: q, k and v share their A. So do gate and up.
    """
    from peft import LoraConfig, get_peft_model

    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    mlp = [] if name in tiny_models.SPARSE else ["gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=[*attention, *mlp], task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, config)
    # A seed with which no token's second and third expert are nearly equal in any step.
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * SPREAD)
    for module in adapted.modules():
        for shared in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            parts = [getattr(module, each) for each in shared if hasattr(module, each)]
            parts = [each.lora_A["default"] for each in parts if hasattr(each, "lora_A")]
            for part in parts[1:]:
                part.weight = parts[0].weight
    return adapted


def _ours(subject: Subject, **changes: Any) -> list[float]:
    values: dict[str, Any] = {
        "load": subject.model,
        "data_path": (write_samples(subject.folder / "tokens", subject.samples),),
        "no_shuffle": True,
        "train_iters": STEPS,
        "global_batch_size": BATCH,
        "lr": RATE,
        "lr_decay_style": "constant",
        "weight_decay": DECAY,
        "clip_grad": CLIP,
        "adam_beta2": 0.95,
        "adam_eps": EPS,
        "calculate_per_token_loss": True,
        # As ms-swift does: a bfloat16 GEMM of padded rows may be rounded in another place.
        "variable_seq_lengths": True,
        "log_file": str(subject.folder / "ours.jsonl"),
    }
    losses: list[float] = call(train, 1, values | changes, timeout=PATIENCE, preload=PRELOAD)[0]
    return losses


def _tokenizer() -> Any:
    """Return a tokenizer of characters, for the tiny vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {text: number for number, text in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[2], pad_token=special[0]
    )


def _conversations() -> Iterator[tuple[str, str]]:
    generator = np.random.default_rng(0)
    letters = list("abcdefgh ,.")
    for _ in range(STEPS * BATCH):
        question, answer = ("".join(generator.choice(letters, n)).strip() or "a" for n in (6, 11))
        yield question, answer


def _cases() -> Iterator[Case]:
    for name in ("qwen3", "qwen3_moe"):
        for layout in LAYOUTS[: 4 if name in tiny_models.SPARSE else 3]:
            yield Case(name, layout.name, partial(full, name, layout))
            yield Case(name, f"LoRA {layout.name}", partial(lora, name, layout))
        yield Case(name, "bf16", partial(bf16, name, ALONE))
        yield Case(name, "ours", partial(ours, name, ALONE))
    without = Layout("TP 2 without SP", 2, "--tensor_model_parallel_size 2")
    yield Case("qwen3", "script", partial(command, "qwen3", without))
    yield Case("qwen3", "export", partial(export, "qwen3", ALONE))
    yield Case("qwen3", "TP 2 by default", partial(full, "qwen3", LAYOUTS[1], dtype=PURE))
    yield Case("qwen3", "--torch_dtype float32", partial(float16, "qwen3", ALONE))


CASES = list(_cases())
