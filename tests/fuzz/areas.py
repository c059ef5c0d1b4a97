"""What is fuzzed: for every reader and command, how a case is drawn and how it is checked."""

import json
from collections.abc import Callable

import yaml
from hypothesis import strategies as st

from mindspeed_llm.cli import chat, convert, generate, posttrain, preprocess, pretrain, show_batch
from mindspeed_mm.cli import convert as mm_convert
from mindspeed_mm.cli import train as mm_train
from tests.fuzz.draws import Case, Draw
from tests.fuzz.preferences import draw_preferences
from tests.llm.mutants import VALUES, as_json, changed, damaged, flags, known_flags

WRITES = {"--save", "--log-file", "--tensorboard-dir", "--output", "--save-dir", "--output-prefix"}
"""Flags that say where to write: an odd value would write outside the test."""
ENDLESS = {"--train-iters", "--train-samples", "--epochs", "--num-train-epochs", "--workers"}
ENDLESS |= {"--n-subs", "--num-workers", "--eval-iters", "--exit-duration-in-mins", "--num-beams"}
"""Flags with which a command does as much work as it is asked for."""


def _raw(draw: Draw) -> Case:
    ending = draw.one(["jsonl", "json", "csv", "parquet"])
    policy = draw.one(["stop", "skip"])
    path = f"raw/good.{ending}"
    if ending == "json" and draw(st.booleans()):
        content = as_json(draw(changed(json.loads(draw.read(path)))))
    else:
        content = draw.damage(path)
    more = ("--input", path, "--on-bad-line", policy)
    return Case("preprocess qwen", more, {path: content}, f"records {path}")


def _documents(draw: Draw) -> Case:
    path = draw.one(["raw/text.jsonl", "raw/good.txt"])
    more = ("--input", path, "--on-bad-line", draw.one(["stop", "skip"]))
    return Case("preprocess text", more, {path: draw.damage(path)}, f"records {path}")


def _index(draw: Draw) -> Case:
    path = draw.find("sft/*.idx")
    if draw(st.booleans()):
        return Case("posttrain hf", (), {path: draw.damage(path)}, "numbers")
    path = "docs/data_text_document.idx"
    command = draw.one(["pretrain hf", "merge"])
    return Case(command, (), {path: draw.damage(path)}, "numbers" if command != "merge" else "")


def _tokens(draw: Draw) -> Case:
    path = draw.find("sft/*.bin")
    return Case(draw.one(["posttrain hf", "show-batch"]), (), {path: draw.damage(path)})


def _summary(draw: Draw) -> Case:
    path = "sft/data.summary.json"
    return Case("show-batch", (), {path: draw.edit(path)})


def _tokenizer(draw: Draw) -> Case:
    path = draw.find("tokenizer/*")
    content = draw.edit(path) if path.endswith(".json") else draw.damage(path)
    return Case("preprocess", (), {path: content})


def _templates(draw: Draw) -> Case:
    path = "raw/templates.json"
    return Case("preprocess template file", (), {path: draw.edit(path)})


def _hf_config(draw: Draw) -> Case:
    path = "hf/config.json"
    return Case(draw.one(["convert hf", "generate hf"]), (), {path: draw.edit(path)})


def _safetensors(draw: Draw) -> Case:
    path = "hf/model.safetensors"
    return Case("convert hf", (), {path: draw.structure(path)}, "rank")


def _hf_index(draw: Draw) -> Case:
    path = "hf/model.safetensors.index.json"
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    good = {"metadata": {"total_size": 9}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    content = as_json(draw(changed(good))) if draw(st.booleans()) else draw(damaged(as_json(good)))
    return Case("convert hf", (), {path: content}, "rank")


def _mcore(draw: Draw) -> Case:
    path = draw.one(
        ["mcore/iter_0000001/mp_rank_00/model_optim_rng.pt"] * 4
        + ["mcore/latest_checkpointed_iteration.txt"]
    )
    content = draw.flip(path) if draw(st.booleans()) else draw.damage(path)
    return Case("convert mcore", (), {path: content}, "weights hf")


def _saved(draw: Draw) -> Case:
    path = draw.find("saved/iter_0000002/[._]*")
    content = draw.flip(path) if draw(st.booleans()) else draw.damage(path)
    command = draw.one(["convert saved", "convert saved", "posttrain finetune", "generate saved"])
    check = "weights good-saved" if command == "convert saved" else "numbers"
    return Case(command, (), {path: content}, check)


def _resume(draw: Draw) -> Case:
    path = (
        draw.find("saved/iter_0000002/*") if draw(st.booleans()) else draw.find("saved/iter*/.m*")
    )
    if path.endswith(".json"):
        content = draw.edit(path)
    else:
        content = draw.flip(path) if draw(st.booleans()) else draw.damage(path)
    return Case("posttrain saved", (), {path: content}, "numbers")


def _tracker(draw: Draw) -> Case:
    root = draw.one(["saved", "mmsaved"])
    path = f"{root}/latest_checkpointed_iteration.txt"
    commands = ["posttrain saved", "convert saved", "generate saved"]
    command = draw.one(commands if root == "saved" else ["mm load", "mm convert dcp"])
    return Case(command, (), {path: draw.damage(path)})


def _lora(draw: Draw) -> Case:
    if draw(st.booleans()):
        path = draw.one(["peft/adapter_config.json", "peft/adapter_model.safetensors"])
        is_json = path.endswith("json")
        content = draw.edit(path) if is_json else draw.structure(path)
        return Case("posttrain lora", (), {path: content}, "" if is_json else "numbers")
    path = draw.find("lora/iter_0000001/*")
    content = draw.edit(path) if path.endswith(".json") else draw.flip(path)
    command, good = draw.one([("export-lora", "peft"), ("export-lora merge", "good-lora")])
    return Case(command, (), {path: content}, "" if path.endswith(".json") else f"weights {good}")


def _gguf(draw: Draw) -> Case:
    path = "gguf/model.gguf"
    return Case("import-gguf", (), {path: draw.damage(path, draw.one([24, 200, 2000, 20000]))})


YAMLS = {
    "preprocess": "preprocess yaml",
    "convert": "convert yaml",
    "posttrain": "posttrain yaml",
    "pretrain": "pretrain yaml",
    "generate": "generate yaml",
    "chat": "chat yaml",
    "mm": "mm convert yaml",
    "report": "report",
}


def _yaml(draw: Draw) -> Case:
    name = draw.one(list(YAMLS))
    path = f"yaml/{name}.yaml"
    return Case(YAMLS[name], (), {path: draw.edit_yaml(path)})


def _mm_yaml(draw: Draw) -> Case:
    values = yaml.safe_load(draw.read("mm/run.yaml"))
    section = draw.one(["model", "data", "fsdp2_config", "training"])
    if draw(st.integers(0, 2)):
        values[section] = draw(changed(values[section]))
        values.setdefault("training", {})
        if isinstance(values["training"], dict):
            values["training"] |= {"save": "out", "train_iters": 1}
        content = yaml.safe_dump(values).encode()
    else:
        content = draw.damage("mm/run.yaml")
    return Case(draw.one(["mm train", "mm plan", "mm plan"]), (), {"mm/run.yaml": content})


def _mm_data(draw: Draw) -> Case:
    path = draw.one(["mm/data.json", "mm/1.png", "mm/2.png", "mm/model/config.json"])
    path = draw.one([path, draw.find("mm/model/*.json")])
    content = draw.edit(path) if path.endswith(".json") else draw.damage(path)
    return Case("mm train", ("--train-iters", "1"), {path: content})


def _mm_weights(draw: Draw) -> Case:
    path = "mm/model/model.safetensors"
    return Case("mm convert hf", (), {path: draw.structure(path)})


def _mm_saved(draw: Draw) -> Case:
    path = draw.find("mmsaved/iter_0000002/[._]*")
    content = draw.flip(path) if draw(st.booleans()) else draw.damage(path)
    command = draw.one(["mm convert dcp", "mm convert dcp", "mm load"])
    check = "weights good-mm" if command == "mm convert dcp" else "numbers"
    return Case(command, (), {path: content}, check)


def _other(draw: Draw) -> Case:
    if draw(st.booleans()):
        return Case("plot", (), {"saved/log.jsonl": draw.damage("saved/log.jsonl")})
    path = "raw/prompts.jsonl"
    return Case("generate prompts", (), {path: draw.damage(path)})


LINES = {
    "preprocess qwen": preprocess,
    "convert hf": convert,
    "show-batch": show_batch,
    "posttrain hf": posttrain,
    "pretrain hf": pretrain,
    "generate hf": generate,
    "chat": chat,
    "mm train": mm_train,
    "mm convert hf": mm_convert,
}


def _flags(draw: Draw) -> Case:
    command = draw.one(list(LINES))
    found = known_flags(LINES[command])
    known = {name: value for name, value in found.items() if name not in WRITES | ENDLESS}
    words = draw(flags(known, VALUES))
    return Case(command, tuple(word for word in words if "\0" not in word))


AREAS: dict[str, tuple[int, Callable[[Draw], Case]]] = {
    "raw data": (12, _raw),
    "documents": (4, _documents),
    "token index": (8, _index),
    "token data": (4, _tokens),
    "summary": (2, _summary),
    "tokenizer": (5, _tokenizer),
    "templates": (3, _templates),
    "HF config": (6, _hf_config),
    "safetensors": (6, _safetensors),
    "safetensors index": (2, _hf_index),
    "mcore .pt": (8, _mcore),
    "training checkpoint": (8, _saved),
    "resume": (8, _resume),
    "tracker": (2, _tracker),
    "LoRA": (5, _lora),
    "GGUF": (4, _gguf),
    "YAML": (8, _yaml),
    "YAML of mm": (4, _mm_yaml),
    "data of mm": (4, _mm_data),
    "weights of mm": (3, _mm_weights),
    "checkpoint of mm": (4, _mm_saved),
    "preferences": (8, draw_preferences),
    "logs and prompts": (2, _other),
    "command lines": (12, _flags),
}
"""How many of a hundred cases, more or less, and what draws one."""
