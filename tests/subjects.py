"""One folder with a good input of every kind, and every command that reads one of them.

Commands are run in a scratch folder: what a test changes is copied there, the rest are links.
"""

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml

from mindspeed_llm.data.template import SHIPPED_PATH
from tests import forked
from tests.small_tokenizers import byte_level

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RECORDS = [{"prompt": f'question {n}, "x"', "response": f"answer\n{n} é"} for n in range(12)]
PAIRS = [
    {"instruction": f"question {n}", "chosen": f"good {n}", "rejected": f"bad\n{n} é"}
    for n in range(6)
]
QUESTIONS = [{"prompt": f"question {n}", "answer": f"{n} é"} for n in range(4)]
REWARDS = "def score(prompts, completions, answer):\n    return [len(c) for c in completions]\n"
DOCUMENTS = [{"text": f"document {n} of a few words, é\n" * 6} for n in range(8)]
TRAIN = "--train-iters 1 --global-batch-size 2 --lr 1e-3 --seq-length 64 --no-shuffle"
SFT = f"{TRAIN} --data-path sft/data --prompt-type qwen"
ANSWER = "--prompt hello --max-new-tokens 2"


@dataclass(frozen=True)
class Command:
    """A command line, run in the scratch folder, and the inputs that it changes itself."""

    words: str
    writes: tuple[str, ...] = ()


COMMANDS = {
    "preprocess": Command(
        "mindspeed-llm preprocess --input raw/good.jsonl --output-prefix out/data "
        "--tokenizer-name-or-path tokenizer --cache-dir cache --prompt-type tokenizer "
        "--handler-name AlpacaStyleInstructionHandler"
    ),
    "preprocess qwen": Command(
        "mindspeed-llm preprocess --input raw/good.jsonl --output-prefix out/data "
        "--tokenizer-name-or-path tokenizer --cache-dir cache --prompt-type qwen "
        "--handler-name AlpacaStyleInstructionHandler"
    ),
    "preprocess template file": Command(
        "mindspeed-llm preprocess --input raw/good.jsonl --output-prefix out/data "
        "--tokenizer-name-or-path tokenizer --cache-dir cache --prompt-type qwen "
        "--handler-name AlpacaStyleInstructionHandler --prompt-type-path raw/templates.json"
    ),
    "preprocess parquet": Command(
        "mindspeed-llm preprocess --input raw/good.parquet --output-prefix out/data "
        "--tokenizer-name-or-path tokenizer --cache-dir cache --prompt-type qwen "
        "--handler-name AlpacaStyleInstructionHandler"
    ),
    "preprocess preferences": Command(
        "mindspeed-llm preprocess --input raw/preferences.jsonl --output-prefix out/data "
        "--tokenizer-name-or-path tokenizer --cache-dir cache --prompt-type qwen --seq-length 200 "
        "--placeholder-token x --reward-tokens + ( --on-bad-line skip"
    ),
    "preprocess text": Command(
        "mindspeed-llm preprocess --input raw/text.jsonl --output-prefix out/data "
        "--tokenizer-name-or-path tokenizer --cache-dir cache"
    ),
    "preprocess gguf": Command(
        "mindspeed-llm preprocess --input raw/text.jsonl --output-prefix out/data "
        "--tokenizer-name-or-path gguf/model.gguf --cache-dir cache"
    ),
    "merge": Command(
        "mindspeed-llm preprocess --input docs --output-prefix out/all --merge-group-keys text"
    ),
    "show-batch": Command("mindspeed-llm show-batch sft/data --cache-dir cache"),
    "convert hf": Command("mindspeed-llm convert --load-dir hf --save-dir out"),
    "convert mcore": Command(
        "mindspeed-llm convert --load-model-type mg --save-model-type hf --load-dir mcore "
        "--save-dir out"
    ),
    "convert mcore layout": Command(
        "mindspeed-llm convert --load-model-type mg --save-model-type mg --load-dir mcore "
        "--save-dir out --target-tensor-parallel-size 2"
    ),
    "convert saved": Command(
        "mindspeed-llm convert --load-model-type mg --save-model-type hf --load-dir saved "
        "--save-dir out"
    ),
    "export-lora": Command("mindspeed-llm export-lora lora out"),
    "export-lora merge": Command("mindspeed-llm export-lora lora out --merge"),
    "import-gguf": Command("mindspeed-llm import-gguf gguf/model.gguf out"),
    "plot": Command("mindspeed-llm plot saved"),
    "posttrain hf": Command(f"mindspeed-llm posttrain --load hf {SFT}"),
    "posttrain raw": Command(
        f"mindspeed-llm posttrain --load hf {TRAIN} --data-path raw/good.jsonl --cache-dir cache "
        "--prompt-type tokenizer"
    ),
    "posttrain lora": Command(
        f"mindspeed-llm posttrain --load hf {SFT} --lora-r 2 --lora-load peft "
        "--lora-target-modules linear_qkv linear_proj"
    ),
    "posttrain dpo": Command(
        f"mindspeed-llm posttrain --stage dpo --load hf {TRAIN} --data-path raw/pairs.jsonl "
        "--cache-dir cache --prompt-type qwen --precompute-ref-log-probs"
    ),
    "posttrain grpo": Command(
        f"mindspeed-llm posttrain --stage grpo --load hf {TRAIN} --data-path raw/questions.jsonl "
        "--handler-name OpenAIPromptHandler --cache-dir cache --prompt-type qwen "
        "--reward-fn raw/rewards.py:score --reward-timeout 3 --num-generations 2 --max-new-tokens 2"
    ),
    "posttrain mcore": Command(f"mindspeed-llm posttrain --load mcore {SFT}"),
    "posttrain saved": Command(f"mindspeed-llm posttrain --load saved {SFT} --train-iters 3"),
    "posttrain resume": Command(
        f"mindspeed-llm posttrain --load hf --save saved {SFT} --train-iters 3", ("saved",)
    ),
    "posttrain finetune": Command(f"mindspeed-llm posttrain --load saved --finetune {SFT}"),
    "pretrain hf": Command(
        f"mindspeed-llm pretrain --load hf {TRAIN} --data-path docs/data_text_document"
    ),
    "pretrain saved": Command(
        f"mindspeed-llm pretrain --load saved --finetune {TRAIN} "
        "--data-path docs/data_text_document"
    ),
    "generate hf": Command(f"mindspeed-llm generate --load hf {ANSWER}"),
    "generate mcore": Command(f"mindspeed-llm generate --load mcore {ANSWER}"),
    "generate saved": Command(f"mindspeed-llm generate --load saved {ANSWER}"),
    "generate prompts": Command(
        "mindspeed-llm generate --load hf --prompts raw/prompts.jsonl --max-new-tokens 2"
    ),
    "chat": Command("mindspeed-llm chat --load hf"),
    "mm train": Command("mindspeed-mm train mm/run.yaml"),
    "mm load": Command("mindspeed-mm train mm/run.yaml --load mmsaved --save out --train-iters 3"),
    "mm resume": Command(
        "mindspeed-mm train mm/run.yaml --save mmsaved --train-iters 3", ("mmsaved",)
    ),
    "mm plan": Command("mindspeed-mm plan mm/run.yaml"),
    "mm convert hf": Command("mindspeed-mm convert --load-dir mm/model --save-dir out"),
    "mm convert dcp": Command(
        "mindspeed-mm convert --load-dir mmsaved --save-dir out --model-assets-dir mm/model"
    ),
    "report": Command("mindspeed report --config yaml/report.yaml"),
    "enable": Command("enable yaml/report.yaml"),
}
YAML = ("preprocess", "convert", "posttrain", "pretrain", "generate", "chat")
COMMANDS |= {
    f"{name} yaml": Command(f"mindspeed-llm {name} --config yaml/{name}.yaml") for name in YAML
}
COMMANDS["mm convert yaml"] = Command("mindspeed-mm convert --config yaml/mm.yaml")


def run(name: str, *more: str, seconds: float = forked.SECONDS) -> forked.End:
    """Run a command of the table in this folder, in a child."""
    words = [*COMMANDS[name].words.split(), *more]
    function = _enable if words[0] == "enable" else forked.command
    return forked.run(function, words, seconds=seconds)


def _enable(words: list[str]) -> int:
    """Put a file's options in force, as a script does."""
    import sys

    import mindspeed
    from mindspeed.config import ConfigError

    try:
        mindspeed.enable(config=words[1])
    except ConfigError as error:
        sys.stderr.write(f"script: error: {error}\n")
        return 2
    return 0


def make(place: Path) -> None:
    """Write a good input of every kind."""
    os.chdir(place)
    byte_level(template=TEMPLATE).save_pretrained("tokenizer")
    _make_model(Path("hf"))
    shutil.copytree("hf", "reference")
    _make_raw(Path("raw"))
    _make_yaml(Path("yaml"))
    _make_gguf(Path("gguf"))
    _made("preprocess qwen", "--output-prefix", "sft/data")
    _made("preprocess text", "--output-prefix", "docs/data")
    _made("preprocess", "--output-prefix", "other/data")  # remembers the tokenizer
    _made("convert hf", "--save-dir", "mcore")
    _made("posttrain hf", "--save", "saved", "--train-iters", "2", "--save-interval", "1")
    targets = "--lora-r 2 --lora-target-modules linear_qkv linear_proj".split()
    _made("posttrain hf", "--save", "lora", *targets)
    _made("export-lora")
    os.rename("out", "peft")
    _made("generate hf")
    _made("posttrain raw")  # keeps its tokens
    _made("posttrain dpo")  # keeps the log-probabilities of the reference
    _made("posttrain grpo")
    _make_mm(Path("mm"))
    _made("mm train", "--save", "mmsaved")
    for name in ("out", "other"):
        shutil.rmtree(name, ignore_errors=True)


def _made(name: str, *more: str) -> None:
    end = run(name, *more, seconds=120)
    assert end.code == 0, (name, end)


def scratch(place: Path, folder: Path, changed: Iterable[str], command: str) -> None:
    """Fill a folder with links to the good inputs and copies of those that will change."""
    copied = {name.partition("/")[0] for name in (*changed, *COMMANDS[command].writes)}
    folder.mkdir(parents=True)
    for entry in place.iterdir():
        if entry.name in copied:
            shutil.copytree(entry, folder / entry.name)
        else:
            (folder / entry.name).symlink_to(entry)


def _make_model(folder: Path) -> None:
    from tests.unit.mindspeed_llm.training.tiny_run import make_model

    tokenizer = byte_level(template=TEMPLATE)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24}
    make_model(folder, vocab_size=len(tokenizer) + 3, **sizes)
    tokenizer.save_pretrained(folder)


def _make_raw(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    (folder / "good.jsonl").write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    (folder / "good.json").write_text(json.dumps(RECORDS, indent=1))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in PAIRS))
    (folder / "questions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in QUESTIONS))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "text.jsonl").write_text("".join(json.dumps(r) + "\n" for r in DOCUMENTS))
    (folder / "good.txt").write_text("".join(r["text"] for r in DOCUMENTS))
    (folder / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    shutil.copyfile(SHIPPED_PATH, folder / "templates.json")
    pq.write_table(pa.Table.from_pylist(RECORDS), folder / "good.parquet", row_group_size=5)
    rows = [(r["prompt"].replace('"', '""'), r["response"]) for r in RECORDS]
    lines = (f'"{question}","{answer}"\n' for question, answer in rows)
    (folder / "good.csv").write_text("prompt,response\n" + "".join(lines))


def _make_yaml(folder: Path) -> None:
    folder.mkdir()
    chosen = {
        "preprocess": COMMANDS["preprocess qwen"],
        "convert": COMMANDS["convert hf"],
        "posttrain": COMMANDS["posttrain hf"],
        "pretrain": COMMANDS["pretrain hf"],
        "generate": COMMANDS["generate hf"],
        "chat": COMMANDS["chat"],
        "mm": COMMANDS["mm convert hf"],
    }
    for name, command in chosen.items():
        values: dict[str, object] = {}
        for word in command.words.split()[2:]:
            if word.startswith("--"):
                key = word[2:].replace("-", "_")
                values[key] = True
            elif key in ("data_path", "prompt"):
                values[key] = [word]
            else:
                values[key] = yaml.safe_load(word)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    (folder / "report.yaml").write_text("use_fused_rmsnorm: true\n")


def _make_gguf(folder: Path) -> None:
    """Write a tiny llama with a tokenizer, as llama.cpp does."""
    import gguf

    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    tokenizer = byte_level()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(24)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    numbers = np.random.default_rng(0)
    for name, shape in _gguf_shapes(len(vocabulary)).items():
        writer.add_tensor(name, numbers.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_shapes(words: int) -> dict[str, tuple[int, ...]]:
    block = {
        "attn_norm": (16,),
        "ffn_norm": (16,),
        "attn_q": (16, 16),
        "attn_k": (8, 16),
        "attn_v": (8, 16),
        "attn_output": (16, 16),
        "ffn_gate": (24, 16),
        "ffn_up": (24, 16),
        "ffn_down": (16, 24),
    }
    shapes = {f"blk.0.{name}.weight": shape for name, shape in block.items()}
    whole = {"token_embd.weight": (words, 16), "output.weight": (words, 16)}
    return shapes | whole | {"output_norm.weight": (16,)}


def _make_mm(folder: Path) -> None:
    from tests.mm.folder import make_folder

    folder.mkdir()
    path = make_folder(folder, train_iters=2)
    content = path.read_text().replace(f"{folder.resolve()}/", "mm/")
    path.write_text(content.replace("save: mm/saved", "save: out"))
    torch.manual_seed(0)
