"""The tensors of a Hugging Face folder, mapped and not read."""

import os
from pathlib import Path

import torch

from mindspeed.checkpoint.file_io import MappedFile
from mindspeed.checkpoint.hf_folder import weight_files
from mindspeed.checkpoint.safetensors_file import read_safetensors
from mindspeed.config import ConfigError

LET_GO = 256 << 20
"""Bytes after which the memory of what has been read is given back."""


class HfFolder:
    """Views of all tensors by name; `files` says which file each is in."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, torch.Tensor] = {}
        self.files: dict[str, str] = {}
        self._mapped: list[MappedFile] = []
        self._unreleased = 0
        for path in _safetensors(self.folder):
            self._mapped.append(MappedFile(path))
            found = read_safetensors(self._mapped[-1])
            if twice := self.tensors.keys() & found.keys():
                raise ConfigError(f"{path}: {min(twice)} is also in another file of {folder}")
            self.tensors |= found
            self.files |= dict.fromkeys(found, path.name)

    def has_read(self, nbytes: int) -> None:
        """Count what has been used; give the memory back from time to time."""
        self._unreleased += nbytes
        if self._unreleased > LET_GO:
            self.release_pages()

    def release_pages(self) -> None:
        """Give back the memory of what has been read."""
        self._unreleased = 0
        for file in self._mapped:
            file.release_pages()


def _safetensors(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder: give one with *.safetensors in it")
    paths = weight_files(folder)
    if not paths:
        raise ConfigError(f"{folder}: has no weights: looked for *.safetensors")
    if wrong := [path.name for path in paths if path.suffix != ".safetensors"]:
        raise ConfigError(
            f"{folder}: {wrong[0]} is a pickle: save the model as safetensors "
            "(save_pretrained does)"
        )
    return paths
