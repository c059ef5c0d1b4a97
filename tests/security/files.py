"""Puts code and bombs into the files of good inputs, in the folder where a command will run."""

import io
import json
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.security.pickles import stream

RANK_FILE = Path("mcore/iter_0000001/mp_rank_00/model_optim_rng.pt")
NEWEST = Path("saved/iter_0000002")
MM_NEWEST = Path("mmsaved/iter_0000002")


def change(path: str, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file."""
    values = json.loads(Path(path).read_text())
    edit(values)
    Path(path).write_text(json.dumps(values))


def put_into_archive(path: Path, body: bytes) -> None:
    """Let a file of torch.save run `body` before what it held."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            is_pickle = name.endswith("data.pkl")
            archive.writestr(name, stream(body, content) if is_pickle else content)


def put_into_hf(body: bytes) -> None:
    """Replace safetensors by the old kind of weights."""
    import torch
    from safetensors.torch import load_file

    for folder in (Path("hf"), Path("mm/model")):
        if folder.is_symlink() or folder.parent.is_symlink() or not folder.is_dir():
            continue
        path = folder / "pytorch_model.bin"
        torch.save(load_file(folder / "model.safetensors"), path)
        (folder / "model.safetensors").unlink()
        put_into_archive(path, body)


def put_into_metadata(folder: Path, body: bytes) -> None:
    """Let .metadata run `body` before what it held."""
    path = folder / ".metadata"
    path.write_bytes(stream(body, path.read_bytes()))


def put_into_tensor(folder: Path, body: bytes) -> None:
    """Append a saved tensor whose description runs `body`, and let .metadata point at it."""
    import torch

    _append(folder, body, lambda entry: hasattr(entry, "size"), torch.zeros(1))


def put_into_bytes(folder: Path, body: bytes) -> None:
    """Append a saved object that runs `body`, and let .metadata point a byte entry at it."""
    _append(folder, body, lambda entry: not hasattr(entry, "size"), None)


def _append(folder: Path, body: bytes, is_wanted: Callable[[Any], bool], value: Any) -> None:
    import torch

    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # ours, of a moment ago
    entries = metadata.state_dict_metadata
    names = [name for name, entry in entries.items() if is_wanted(entry)]
    if not names:  # the multimodal suite writes none: add one
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

        names = [next(name for name in entries if name.startswith("model."))]
        entries[names[0]] = BytesStorageMetadata()
        for index in [i for i in metadata.storage_data if i.fqn == names[0]]:
            info = metadata.storage_data.pop(index)
            metadata.storage_data[MetadataIndex(names[0])] = info
    saved = io.BytesIO()
    torch.save(value, saved)
    for index, info in metadata.storage_data.items():
        if index.fqn not in names:
            continue
        file = folder / info.relative_path
        aside = folder / "aside"
        aside.write_bytes(saved.getvalue())
        put_into_archive(aside, body)
        info.offset, info.length = file.stat().st_size, aside.stat().st_size
        with file.open("ab") as opened:
            opened.write(aside.read_bytes())
        aside.unlink()
    path.write_bytes(pickle.dumps(metadata))


def put_in_place_of(path: str, body: bytes) -> None:
    """Write a plain pickle where another file was."""
    Path(path).write_bytes(stream(body))


def array_of_objects(path: str, body: bytes) -> None:
    """Write an .npy file of objects where another file was."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    Path(path).write_bytes(content + stream(body))


def torchscript(path: Path, canary: str) -> None:
    """Write a program that saves a tensor when it is loaded."""
    import torch

    class Program(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.path = canary

        @torch.jit.export
        def __getstate__(self) -> tuple[str, bool]:
            return self.path, self.training

        @torch.jit.export
        def __setstate__(self, state: tuple[str, bool]) -> None:
            self.path = state[0]
            self.training = state[1]
            torch.ops.aten.save(self.path, self.path)

        def forward(self) -> int:
            return 0

    torch.jit.save(torch.jit.script(Program()), path)


def bomb(size: int) -> bytes:
    """Return the raw deflate stream of so many zeros (a multiple of a MiB), made at once."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block + again * ((size >> 20) - 1) + packer.flush(zlib.Z_FINISH)


def zip_bomb(path: Path, size: int = 8 << 30) -> None:
    """Replace the description in a file of torch.save by one that unpacks to `size` bytes."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    target = next(name for name in members if name.endswith("data.pkl"))
    packed = bomb(size)
    members[target] = packed
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
            if name == target:
                info = archive.getinfo(name)
                info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, size


def image_bomb(path: str, side: int = 100_000) -> None:
    """Write a PNG of side x side white pixels in a few MB."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    packed = b"\x78\x01" + bomb((side // 8 + 1) * side >> 20 << 20)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + content)


def postscript(path: str, canary: str) -> None:
    """Write an EPS image, for which Pillow starts the program gs, and such a program."""
    lines = ["%!PS-Adobe-3.0 EPSF-3.0", "%%BoundingBox: 0 0 8 8", "%%EndComments", "showpage"]
    Path(path).write_text("\n".join([*lines, "%%EOF", ""]))
    program = Path("bin/gs")
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\ntouch {canary}\n")
    program.chmod(0o755)


def module(folder: str, canary: str) -> None:
    """Write Python files beside a model, under the names that `auto_map` will give."""
    code = f"open({canary!r}, 'w')\nclass Evil:\n    pass\n"
    for name in ("evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py"):
        Path(folder, name).write_text(code)
    custom = Path(folder, "custom_generate")
    custom.mkdir(exist_ok=True)
    (custom / "generate.py").write_text(code)


def safetensors(path: str, edit: Callable[[dict[str, Any]], object] | None, **raw: Any) -> None:
    """Write a safetensors file again with another header, or with other bytes for it."""
    content = Path(path).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if edit is not None:
        edit(header)
    text = raw.get("header", json.dumps(header).encode())
    size = raw.get("length", len(text))
    Path(path).write_bytes(struct.pack("<Q", size) + text + content[8 + length :])


def copy_outside(path: str) -> str:
    """Move a file out of its folder, and return the way to it from there."""
    source = Path(path)
    target = source.resolve().parent.parent / f"outside-{source.name}"
    shutil.move(source, target)
    return f"../{target.name}"
