"""Binary files whose headers, paths or sizes lie."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.security import files
from tests.security.payload import (
    HF,
    MCORE,
    MM_HF,
    MM_SAVED,
    SAVED,
    Payload,
    Poison,
)


def _overlap(header: dict[str, dict[str, list[int]]]) -> None:
    names = [name for name in header if name != "__metadata__"]
    same = [one for one in names if header[one]["shape"] == header[names[0]]["shape"]]
    header[same[-1]]["data_offsets"] = header[names[0]]["data_offsets"]
    if len(same) == 1:
        header[names[0]]["data_offsets"] = [0, header[names[0]]["data_offsets"][1]]


def _first(header: dict[str, dict[str, object]]) -> dict[str, object]:
    return header[next(name for name in header if name != "__metadata__")]


def _safetensors(**how: object) -> Callable[[str], Poison]:
    return lambda path: (
        lambda canary: files.safetensors(
            path,
            how.get("edit"),
            **{  # type: ignore[arg-type]
                key: value for key, value in how.items() if key != "edit"
            },
        )
    )


HEADERS = {
    "a huge header": _safetensors(length=1 << 62),
    "a header beyond the file": _safetensors(length=1 << 30),
    "overlapping tensors": _safetensors(edit=_overlap),
    "negative offsets": _safetensors(edit=lambda h: _first(h).update(data_offsets=[-8, 0])),
    "an endless shape": _safetensors(edit=lambda h: _first(h).update(shape=[1 << 40, 1 << 40])),
    "a shape that wraps to 0": _safetensors(edit=lambda h: _first(h).update(shape=[1 << 32] * 2)),
    "an unknown type": _safetensors(edit=lambda h: _first(h).update(dtype="OBJECT")),
    "nested header": _safetensors(header=b"[" * 100_000),
    "duplicate keys": _safetensors(
        header=b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    ),
}


def headers() -> Iterator[Payload]:
    """Yield safetensors files whose header lies."""
    for name, make in HEADERS.items():
        yield Payload(
            f"safetensors: {name}",
            ("hf",),
            "model.safetensors",
            ("convert hf", "posttrain hf", "generate hf"),
            make("hf/model.safetensors"),
        )
        yield Payload(
            f"safetensors of mm: {name}",
            ("mm",),
            "model.safetensors",
            MM_HF,
            make("mm/model/model.safetensors"),
        )
        yield Payload(
            f"adapters: {name}",
            ("peft",),
            "adapter_model.safetensors",
            ("posttrain lora",),
            make("peft/adapter_model.safetensors"),
        )


def _index(folder: str) -> Poison:
    def poison(canary: str) -> None:
        way = files.copy_outside(f"{folder}/model.safetensors")
        path = Path(folder, "model.safetensors.index.json")
        path.write_text(f'{{"weight_map": {{"x": "{way}"}}}}')

    return poison


def _outside_metadata(folder: Path) -> Poison:
    def poison(canary: str) -> None:
        import pickle

        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        for info in metadata.storage_data.values():
            source = folder / info.relative_path
            if source.exists():
                files.copy_outside(str(source))
            info.relative_path = f"../outside-{source.name}"
        path.write_bytes(pickle.dumps(metadata))

    return poison


def _tracker(root: str, text: str) -> Poison:
    def poison(canary: str) -> None:
        os.rename(f"{root}/iter_0000002", "outside")
        Path(root, "latest_checkpointed_iteration.txt").write_text(text)

    return poison


def _gguf(offset: int, content: bytes) -> Poison:
    def poison(canary: str) -> None:
        path = Path("gguf/model.gguf")
        found = bytearray(path.read_bytes())
        found[offset : offset + len(content)] = content
        path.write_bytes(found)

    return poison


PATHS = (
    Payload("../ in an index", ("hf",), "model.safetensors.index.json", HF, _index("hf")),
    Payload(
        "../ in an index of mm", ("mm",), "model.safetensors.index.json", MM_HF, _index("mm/model")
    ),
    Payload("../ in .metadata", ("saved",), ".metadata", SAVED, _outside_metadata(files.NEWEST)),
    Payload(
        "../ in .metadata of mm",
        ("mmsaved",),
        ".metadata",
        MM_SAVED,
        _outside_metadata(files.MM_NEWEST),
    ),
    Payload(
        "../ in the tracker",
        ("saved",),
        "latest_checkpointed_iteration.txt",
        (SAVED[0], SAVED[2], SAVED[5]),
        _tracker("saved", "../outside"),
    ),
    Payload(
        "odd digits in the tracker",
        ("saved",),
        "latest_checkpointed_iteration.txt",
        (SAVED[0], SAVED[2], SAVED[5]),
        _tracker("saved", "²"),
    ),
    Payload(
        "digits without end in the tracker",
        ("saved",),
        "latest_checkpointed_iteration.txt",
        (SAVED[0], SAVED[2], SAVED[5]),
        _tracker("saved", "9" * 5000),
    ),
    Payload(
        "../ in the tracker of mm",
        ("mmsaved",),
        "latest_checkpointed_iteration.txt",
        ("mm resume", "mm convert dcp"),
        _tracker("mmsaved", "../outside"),
    ),
    Payload(
        "a zip bomb as .pt",
        ("mcore",),
        "model_optim_rng.pt",
        MCORE,
        lambda canary: files.zip_bomb(files.RANK_FILE),
    ),
    Payload(
        "a zip bomb as common.pt",
        ("saved",),
        "common.pt",
        SAVED[1:3],
        lambda canary: files.zip_bomb(files.NEWEST / "common.pt"),
    ),
    Payload(
        "an image bomb",
        ("mm",),
        "1.png",
        ("mm train",),
        lambda canary: files.image_bomb("mm/1.png"),
    ),
    Payload(
        "GGUF: tensors without end",
        ("gguf",),
        "model.gguf",
        ("import-gguf", "preprocess gguf"),
        _gguf(8, b"\xff" * 7),
    ),
    Payload(
        "GGUF: keys without end",
        ("gguf",),
        "model.gguf",
        ("import-gguf", "preprocess gguf"),
        _gguf(16, b"\xff" * 7),
    ),
    Payload(
        "GGUF: a name without end",
        ("gguf",),
        "model.gguf",
        ("import-gguf", "preprocess gguf"),
        _gguf(24, b"\xff" * 7),
    ),
)
