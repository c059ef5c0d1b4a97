"""Load a torch.distributed.checkpoint from verified metadata, and objects as weights only.

torch itself unpickles .metadata, and every entry that is not a tensor. What is handed to it here
has been rebuilt from verified records, and entries are loaded with `weights_only=True`.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from mindspeed.checkpoint.dcp_entries import EntryVerifier
from mindspeed.config import ConfigError

EXTRA_STATE = "_extra_state"
"""In the name of what a layer saves beside its tensors: FP8 scales of Transformer Engine."""


@contextmanager
def weights_only(
    folder: Path, metadata: Metadata, entries: EntryVerifier | None = None
) -> Iterator[None]:
    """Make every load in this block safe: Megatron creates its reader and planner itself.

    Its classes differ between versions, but all inherit these methods of torch. `torch.load` is
    covered because Megatron opens common.pt itself, with `weights_only=False` in 0.12. With
    `entries`, what is loaded has to have their digests.
    """
    original_load = torch.load
    original_slice, original_read = FileSystemReader._slice_file, FileSystemReader.read_data

    def read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
        if Path(self.path) != folder:
            raise ConfigError(f"{self.path}: is read while {folder} is loaded")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def slice_file(self: FileSystemReader, file: Any, sinfo: Any) -> Any:
        entry = entries and entries.open(sinfo.relative_path, sinfo.offset, sinfo.length)
        return entry or original_slice(self, file, sinfo)

    def read_data(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Any:
        try:
            return original_read(self, plan, planner)
        finally:
            if entries is not None:
                entries.finish()  # its error replaces one that the same damage has caused

    def load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        _load_entry(folder, self, read_item, value)

    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original_load(f, *args, **kwargs | {"weights_only": True})
        except Exception as error:
            if isinstance(f, str | os.PathLike):
                raise ConfigError(f"{f}: cannot be loaded safely ({_first_line(error)})") from None
            raise

    with (
        _replaced(FileSystemReader, "read_metadata", read_metadata),
        _replaced(FileSystemReader, "_slice_file", slice_file),
        _replaced(FileSystemReader, "read_data", read_data),
        _replaced(DefaultLoadPlanner, "load_bytes", load_bytes),
        _replaced(torch, "load", load),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _load_entry(
    folder: Path, planner: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO
) -> None:
    """Do what DefaultLoadPlanner.load_bytes does, without running what is in the entry."""
    name = read_item.dest_index.fqn
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        if EXTRA_STATE in name:
            loaded = _without_scales(loaded)
    except Exception as error:
        assert planner.metadata is not None
        file = planner.metadata.storage_data[read_item.storage_index].relative_path
        raise ConfigError(
            f"{folder / file}: the entry {name} cannot be loaded safely ({_first_line(error)})"
        ) from None
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], loaded)
    else:
        planner.state_dict[name] = loaded


def _without_scales(value: Any) -> Any:
    """Return an extra state without its bytes, which Megatron's grouped experts unpickle.

    The layers of this run have no FP8 scales to fill, so nothing that is used is lost.
    """
    if isinstance(value, list):
        return [_without_scales(each) for each in value]
    if value is None:
        return None
    if not isinstance(value, torch.Tensor | io.BytesIO):
        raise ConfigError(f"it holds a {type(value).__name__}, not the bytes of FP8 scales")
    return torch.empty(0, dtype=torch.uint8)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
