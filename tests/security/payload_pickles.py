"""Pickles, in files that hold one and in files that should not."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.security import files
from tests.security.payload import (
    DOCUMENTS,
    HF,
    LORA,
    MCORE,
    MM_HF,
    MM_SAVED,
    SAVED,
    TOKENIZER,
    TOKENS,
    Payload,
    Poison,
)
from tests.security.pickles import TECHNIQUES

BODY = "reduce os.system"
"""The technique that every command gets to see; the others go to one command a file."""
SOME = (BODY, "build", "dataclass of torch's modules", "nested torch._load_from_bytes")
ALL = tuple(TECHNIQUES)


@dataclass(frozen=True)
class PickleFile:
    """A file that holds a pickle."""

    name: str
    changed: tuple[str, ...]
    named: str
    commands: tuple[str, ...]
    put: Callable[[bytes], object]
    techniques: tuple[str, ...] = SOME
    is_harmless: bool = False


PICKLE_FILES = (
    PickleFile(
        "a rank's .pt",
        ("mcore",),
        "model_optim_rng.pt",
        MCORE,
        lambda body: files.put_into_archive(files.RANK_FILE, body),
        ALL,
    ),
    PickleFile(
        "an old .pt",
        ("mcore",),
        "model_optim_rng.pt",
        MCORE,
        lambda body: files.put_in_place_of(str(files.RANK_FILE), body),
    ),
    PickleFile("pytorch_model.bin", ("hf",), "pytorch_model.bin", HF, files.put_into_hf),
    PickleFile("pytorch_model.bin of mm", ("mm",), "pytorch_model.bin", MM_HF, files.put_into_hf),
    PickleFile(
        "common.pt",
        ("saved",),
        "common.pt",
        SAVED[1:3],
        lambda body: files.put_into_archive(files.NEWEST / "common.pt", body),
    ),
    PickleFile(
        ".metadata",
        ("saved",),
        ".metadata",
        SAVED,
        lambda body: files.put_into_metadata(files.NEWEST, body),
        ALL,
    ),
    PickleFile(
        ".metadata of adapters",
        ("lora",),
        ".metadata",
        LORA,
        lambda body: files.put_into_metadata(Path("lora/iter_0000001"), body),
    ),
    PickleFile(
        ".metadata of mm",
        ("mmsaved",),
        ".metadata",
        MM_SAVED,
        lambda body: files.put_into_metadata(files.MM_NEWEST, body),
    ),
    PickleFile(
        "a byte entry",
        ("saved",),
        "iter_0000002",
        SAVED[1:3],
        lambda body: files.put_into_bytes(files.NEWEST, body),
        ALL,
    ),
    PickleFile(
        "a byte entry that is not needed",
        ("saved",),
        "iter_0000002",
        (SAVED[0], *SAVED[3:]),
        lambda body: files.put_into_bytes(files.NEWEST, body),
        is_harmless=True,
    ),
    PickleFile(
        "a byte entry of mm",
        ("mmsaved",),
        "iter_0000002",
        MM_SAVED,
        lambda body: files.put_into_bytes(files.MM_NEWEST, body),
    ),
    PickleFile(
        "a tensor entry",
        ("saved",),
        "iter_0000002",
        SAVED,
        lambda body: files.put_into_tensor(files.NEWEST, body),
    ),
    PickleFile(
        "a tensor entry of mm",
        ("mmsaved",),
        "iter_0000002",
        MM_SAVED,
        lambda body: files.put_into_tensor(files.MM_NEWEST, body),
    ),
)


def pickles() -> Iterator[Payload]:
    """Yield every technique in every file that is a pickle."""
    for file in PICKLE_FILES:
        for technique in file.techniques:
            code = TECHNIQUES[technique]
            commands = file.commands if technique == BODY else file.commands[:1]

            def poison(
                canary: str, file: PickleFile = file, code: Callable[..., bytes] = code
            ) -> None:
                file.put(code(canary))

            name = f"{technique} in {file.name}"
            more = file.is_harmless
            yield Payload(name, file.changed, file.named, commands, poison, more)


def _body(canary: str) -> bytes:
    return TECHNIQUES[BODY](canary)


def _replaced(path: str) -> Poison:
    return lambda canary: files.put_in_place_of(path, _body(canary))


def _objects(path: str) -> Poison:
    return lambda canary: files.array_of_objects(path, _body(canary))


SFT = ("sft/data_packed_input_ids_document.idx", "sft/data_packed_labels_document.bin")
TEXT = "docs/data_text_document.idx"


def _arrow(canary: str) -> None:
    """A parquet file with a column of a type that pyarrow used to unpickle."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = {b"ARROW:extension:name": b"arrow.py_extension_type"}
    kind[b"ARROW:extension:metadata"] = files.stream(_body(canary))
    fields = [pa.field("prompt", pa.string(), metadata=kind), pa.field("response", pa.string())]
    table = pa.table([["a"], ["b"]], schema=pa.schema(fields))
    Path("raw/good.jsonl").unlink()
    pq.write_table(table, "raw/good.jsonl.parquet")
    os.rename("raw/good.jsonl.parquet", "raw/good.parquet")


FOREIGN = (
    Payload("a pickle as .idx", ("sft",), ".idx", TOKENS, _replaced(SFT[0])),
    Payload("an .npy of objects as .idx", ("sft",), ".idx", TOKENS, _objects(SFT[0])),
    Payload("a pickle as .bin", ("sft",), "labels_document", TOKENS, _replaced(SFT[1])),
    Payload("a pickle as .idx of documents", ("docs",), ".idx", DOCUMENTS, _replaced(TEXT)),
    Payload("an .npy of objects as documents", ("docs",), ".idx", DOCUMENTS, _objects(TEXT)),
    Payload(
        "a pickle as safetensors",
        ("hf",),
        "model.safetensors",
        HF,
        _replaced("hf/model.safetensors"),
    ),
    Payload(
        "a pickle as safetensors of mm",
        ("mm",),
        "model.safetensors",
        MM_HF,
        _replaced("mm/model/model.safetensors"),
    ),
    Payload(
        "a pickle as adapters",
        ("peft",),
        "adapter_model",
        ("posttrain lora",),
        _replaced("peft/adapter_model.safetensors"),
    ),
    Payload(
        "a pickle as GGUF",
        ("gguf",),
        "model.gguf",
        ("import-gguf", "preprocess gguf"),
        _replaced("gguf/model.gguf"),
    ),
    Payload(
        "a pickle as tokenizer.json",
        ("tokenizer",),
        "tokenizer",
        TOKENIZER,
        _replaced("tokenizer/tokenizer.json"),
    ),
    Payload(
        "a pickle as training.json",
        ("saved",),
        "training.json",
        SAVED[1:3],
        _replaced("saved/iter_0000002/training.json"),
    ),
    Payload(
        "a pickle as tracker",
        ("saved",),
        "latest_checkpointed_iteration.txt",
        (SAVED[0], *SAVED[2:]),
        _replaced("saved/latest_checkpointed_iteration.txt"),
    ),
    Payload("a pickle as log", ("saved",), "log.jsonl", ("plot",), _replaced("saved/log.jsonl")),
    Payload(
        "a pickle as records",
        ("raw",),
        "good.jsonl",
        ("preprocess", "posttrain raw"),
        _replaced("raw/good.jsonl"),
    ),
    Payload(
        "a pickle as prompts",
        ("raw",),
        "prompts.jsonl",
        ("generate prompts",),
        _replaced("raw/prompts.jsonl"),
    ),
    Payload(
        "a pickle as templates",
        ("raw",),
        "templates.json",
        ("preprocess template file",),
        _replaced("raw/templates.json"),
    ),
    Payload(
        "a pickled type in parquet", ("raw",), "", ("preprocess parquet",), _arrow, is_harmless=True
    ),
    Payload("a pickle as an image", ("mm",), ".png", ("mm train",), _replaced("mm/1.png")),
)


def _cached(pattern: str, put: Callable[[str, bytes], object]) -> Poison:
    def poison(canary: str) -> None:
        for path in Path("cache").glob(pattern):
            put(str(path), _body(canary))

    return poison


CACHES = (
    Payload(
        "a pickle as remembered tokenizer",
        ("cache",),
        "",
        ("preprocess",),
        _cached("tokenizers/*.json", files.put_in_place_of),
        is_harmless=True,
    ),
    Payload(
        "a pickle as tokens kept from before",
        ("cache",),
        ".idx",
        ("posttrain raw",),
        _cached("data/*/*input_ids*.idx", files.put_in_place_of),
    ),
    Payload(
        "objects as tokens kept from before",
        ("cache",),
        ".idx",
        ("posttrain raw",),
        _cached("data/*/*input_ids*.idx", files.array_of_objects),
    ),
    Payload(
        "a pickle as log-probabilities of the reference",
        ("cache",),
        "",
        ("posttrain dpo",),
        _cached("reference/*.npy", files.put_in_place_of),
        is_harmless=True,
    ),
    Payload(
        "objects as log-probabilities of the reference",
        ("cache",),
        "",
        ("posttrain dpo",),
        _cached("reference/*.npy", files.array_of_objects),
        is_harmless=True,
    ),
    Payload(
        "a pickle as summary kept from before",
        ("cache",),
        "summary.json",
        ("posttrain raw",),
        _cached("data/*/*summary.json", files.put_in_place_of),
        is_harmless=True,
    ),
)
