"""Generated inputs, the same for all rows: a model config, a tokenizer, text, images.

Every word is one token: a text of n words has n tokens, whichever package encodes it.
"""

import itertools
import json
import string
import subprocess
import sys
from pathlib import Path

import numpy as np

from commands.job import ROOT

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTES = [chr(number) for number in (*range(33, 127), *range(161, 173), *range(174, 324))]
"""The characters by which byte-level tokenizers represent bytes."""
SPACE, LETTERS = "\u0120", string.ascii_letters
PICTURE = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MEAN_LENGTH, SPREAD = 0.18, 0.9
"""Conversations: mean length relative to the longest, sigma of its logarithm."""
DOCUMENT = 3000
RANDOM_WEIGHTS = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM

torch.manual_seed(1)
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
model.bfloat16().cpu().save_pretrained(sys.argv[1])
"""
TEMPLATE = 24
"""The most tokens that the chat template adds to a conversation."""


def prepare(job, has_conversations=True):
    """Write the inputs; a folder prepared for the same settings is reused."""
    done = job.folder / "prepared.json"
    settings = {
        "steps": job.steps,
        "layers": job.shape.layers,
        "global_batch": job.global_batch,
        "conversations": has_conversations,
    }
    if done.is_file() and json.loads(done.read_text()) == settings:
        return
    job.folder.mkdir(parents=True, exist_ok=True)
    print(f"preparing {job.folder}", flush=True)
    write_model(job.shape, job.folder / "model")
    text = Text(job.shape.vocabulary, seed=1)
    _write_documents(job, text)
    if has_conversations:
        _write_conversations(job, text)
    _preprocess(job, has_conversations)
    done.write_text(json.dumps(settings))


def write_model(shape, folder):
    """Write the config.json of a model of the shape, and the tokenizer."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

    experts = {}
    if shape.num_experts:
        kind, name = Qwen3MoeConfig, "Qwen3Moe"
        experts = {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.top_k,
            "moe_intermediate_size": shape.ffn,
            "head_dim": shape.head_size,
            "norm_topk_prob": True,
        }
    else:
        kind, name = (Qwen2Config, "Qwen2") if shape.has_qkv_bias else (LlamaConfig, "Llama")
    config = kind(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.sequence,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=shape.is_tied,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
        architectures=[f"{name}ForCausalLM"],
        **experts,
    )
    config.save_pretrained(folder)
    words = tokenizer(shape.vocabulary)
    words.save_pretrained(folder)
    # Next to a config.json transformers loads the tokenizer of that family, whatever the file says.
    words.save_pretrained(folder.with_name("tokenizer"))


def write_random_weights(folder):
    """Write bf16 weights beside a config.json, in a process that leaves no memory on a device."""
    subprocess.run([sys.executable, "-c", RANDOM_WEIGHTS, str(folder)], check=True)


class Text:
    """Random words."""

    def __init__(self, vocabulary, seed):
        self.generator = np.random.default_rng(seed)
        self._words = [" " + "".join(word) for word in itertools.product(*letters(vocabulary))]

    def draw(self, length):
        """Return a text of `length` tokens; it begins with a space."""
        drawn = self.generator.integers(0, len(self._words), length)
        return "".join(self._words[number] for number in drawn)


def letters(vocabulary):
    """Return the letters of each position of a word: as many as the vocabulary has words for."""
    size = 13
    while size**4 + 2 * size**2 + size + len(BYTES) + len(SPECIAL) + len(PICTURE) > vocabulary:
        size -= 1
    return [LETTERS[13 * index : 13 * index + size] for index in range(4)]


def tokenizer(vocabulary):
    """Return a Qwen2 tokenizer for which a space and a word of four letters are one token.

    No two positions of a word share a letter, so pairs are merged in one way only.
    """
    from transformers import Qwen2Tokenizer

    one, two, three, four = letters(vocabulary)
    starts = [(SPACE, a) for a in one]
    halves = [(SPACE + a, b) for a in one for b in two]
    ends = [(c, d) for c in three for d in four]
    words = [("".join(half), "".join(end)) for half in halves for end in ends]
    merges = [*starts, *halves, *ends, *words]
    names = [*SPECIAL, *PICTURE.values(), *BYTES, *("".join(pair) for pair in merges)]
    return Qwen2Tokenizer(
        vocab={name: number for number, name in enumerate(names)},
        merges=merges,
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT,
        extra_special_tokens=PICTURE | {"turn_start_token": "<|im_start|>"},
        model_max_length=10**6,
    )


def conversation_lengths(generator, count, longest):
    """Draw lengths distributed as in instruction data: many short ones, few long ones."""
    mean = MEAN_LENGTH * longest
    drawn = generator.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)
    return np.clip(drawn, 12, longest - TEMPLATE).astype(int)


def _write_documents(job, text):
    tokens = (job.steps + 2) * job.tokens_per_step
    length = min(DOCUMENT, job.shape.sequence)
    path = job.folder / "documents" / "documents.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        for _ in range(-(-tokens // length)):
            file.write(json.dumps({"text": text.draw(length)}) + "\n")


def _write_conversations(job, text):
    count = (job.steps + 2) * job.samples_per_step
    lengths = conversation_lengths(text.generator, count, job.shape.sequence)
    with (job.folder / "conversations.jsonl").open("w") as file:
        for length in lengths:
            asked = max(int(length * 0.3), 1)
            record = {
                "instruction": text.draw(asked),
                "input": "",
                "output": text.draw(length - asked),
            }
            file.write(json.dumps(record) + "\n")


def _preprocess(job, has_conversations):
    """Preprocess the text into token files by our own command."""
    sequence = ["--seq-length", str(job.shape.sequence)]
    chat = ["--handler-name", "AlpacaStyleInstructionHandler", "--prompt-type", "tokenizer"]
    runs = {
        "pretrain": (job.folder / "documents" / "documents.jsonl", ["--append-eod"]),
        "sft": (job.folder / "conversations.jsonl", [*chat, *sequence]),
        "packed": (
            job.folder / "conversations.jsonl",
            [*chat, *sequence, "--pack", "--neat-pack"],
        ),
    }
    for name, (source, flags) in runs.items():
        if name != "pretrain" and not has_conversations:
            continue
        command = [sys.executable, str(ROOT / "preprocess_data.py"), "--input", str(source)]
        command += ["--tokenizer-name-or-path", str(job.folder / "tokenizer"), "--workers", "8"]
        command += ["--output-prefix", str(job.folder / name), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write_pictures(folder: Path, count: int, side: int) -> list[str]:
    """Write smooth images, which decode like photographs; return their names."""
    from PIL import Image

    generator = np.random.default_rng(2)
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number in range(count):
        small = Image.fromarray(generator.integers(0, 255, (16, 16, 3), dtype=np.uint8))
        small.resize((side, side), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg")
        names.append(f"{number}.jpg")
    return names


def write_swift_rows(job, path: Path) -> None:
    """Write full rows for ms-swift, which appends an end token to each."""
    text = Text(job.shape.vocabulary, seed=1)
    with path.open("w") as file:
        for _ in range((job.steps + 2) * job.global_batch):
            message = {"role": "assistant", "content": text.draw(job.shape.sequence - 1)}
            file.write(json.dumps({"messages": [message]}) + "\n")


def write_picture_records(job, folder: Path, side: int, tokens: int) -> int:
    """Write conversations about one image each; return their common length."""
    text = Text(job.shape.vocabulary, seed=3)
    names = write_pictures(folder, 4 * job.global_batch, side)
    turns = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": ""}]
    words = tokenizer(job.shape.vocabulary)
    empty = words(words.apply_chat_template(turns, tokenize=False))["input_ids"]
    length = job.shape.sequence - tokens - len(empty) + 1  # one of them is the image
    asked = max(length // 10, 1)
    records = []
    for number in range((job.steps + 2) * job.global_batch):
        turns = [
            {"from": "human", "value": f"<image>{text.draw(asked)}"},
            {"from": "gpt", "value": text.draw(length - asked)},
        ]
        records.append({"images": [names[number % len(names)]], "conversations": turns})
    (folder / "data.json").write_text(json.dumps(records))
    return job.shape.sequence
