"""The weights of a torch.distributed.checkpoint under the names of a model or an HF folder.

The values stay in the files until they are written.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed.checkpoint.assembly import FullTensor, Shard, SliceCopy, StoredTensor, check_names
from mindspeed.checkpoint.dcp_files import DcpFiles
from mindspeed.checkpoint.dcp_metadata import DcpTensor, byte_ranges, read_dcp_tensors
from mindspeed.checkpoint.detection import ADAPTER_CONFIG, read_adapter_config
from mindspeed.checkpoint.file_io import aligned
from mindspeed.checkpoint.hf_folder import SafetensorsOutput, shard_outputs, weight_files
from mindspeed.checkpoint.output import TypedTensor
from mindspeed.checkpoint.tensor_slice import full_slice, to_index
from mindspeed.config import ConfigError
from mindspeed.training.checkpoint_dir import STATE_FILE, read_state
from mindspeed_mm.models.meta_device import tied_names
from mindspeed_mm.models.weights import (
    ADAPTER,
    BASE,
    HfFolder,
    conversions,
    upstream_model,
)

PREFIXES = ("model.model.", "model.", "")
"""Prefixes of a model's tensors: training adds `model.`, and TransformersModel keeps the model of
transformers in its own `model`."""
OTHERS = ("optimizer.",)


class DcpModel:
    """The weights of a checkpoint by the names of the model without adapters, which are merged."""

    def __init__(
        self, folder: Path, known: Mapping[str, torch.Tensor], lora_alpha: int | None = None
    ) -> None:
        """Read the metadata of a checkpoint safely; `known` tensors have to be present."""
        self._files = DcpFiles(folder)
        stored = read_dcp_tensors(folder)
        self._tensors = _without_prefix(stored, known)
        self.ranges = byte_ranges(stored, self._tensors.values())
        """Their byte ranges in the files, which may hold an optimizer as well."""
        adapters = [name for name in self._tensors if ADAPTER in name]
        self._alpha = _alpha(folder, adapters[0], lora_alpha) if adapters else None
        self.names = {n.replace(BASE, ""): n for n in self._tensors if ADAPTER not in n}
        """The tensor in the checkpoint for each of the model."""
        self.copies: set[str] = set()
        """Names that the checkpoint holds under the name of a tensor they are tied to."""
        if known:
            tied = tied_names(known)
            for name in known.keys() - self.names.keys():  # of tied tensors one is enough
                if other := next((n for n in tied[name] if n in self.names), None):
                    self.names[name] = self.names[other]
                    self.copies.add(name)
            check_names(self.names, known, str(folder))
        elif not self.names:
            raise ConfigError(f"{folder}: has no weights")
        else:  # a state dict holds a tied tensor under all of its names
            for other, name in _tied(folder).items():
                if name in self.names:
                    self.names.setdefault(other, self.names[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._tensors[self.names[name]].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._files.values(self._tensors[self.names[name]].chunks[0]).dtype

    def full_tensor(self, name: str) -> FullTensor:
        """Return a tensor, as views of files if it has no adapter."""
        stored = self.names[name]
        if not stored.endswith(f"{BASE}.weight"):
            return self._stored(stored)
        merged = self._merged(stored.removesuffix(f"{BASE}.weight"))
        return FullTensor([Shard(full_slice(merged.shape), merged)])

    def tensor(self, name: str) -> torch.Tensor:
        """Return a contiguous tensor."""
        return _joined(self.full_tensor(name), self.shape(name))

    def release_pages(self) -> None:
        """Release the memory of what has been read."""
        for file in self._files.opened():
            file.release_pages()

    def _stored(self, stored: str) -> FullTensor:
        chunks = self._tensors[stored].chunks
        return FullTensor([Shard(chunk.region, self._files.values(chunk)) for chunk in chunks])

    def _merged(self, layer: str) -> torch.Tensor:
        """Merge an adapter into its base layer."""
        ends = (f"{BASE}.weight", ".lora_A.default.weight", ".lora_B.default.weight")
        base, low, high = (
            _joined(self._stored(layer + end), self._tensors[layer + end].shape) for end in ends
        )
        assert self._alpha is not None
        added = (self._alpha / len(low)) * (high.float() @ low.float())
        return (base.float() + added).to(base.dtype)


class HfView(Mapping[str, FullTensor]):
    """The tensors of a Hugging Face folder, each made from the checkpoint when it is requested."""

    def __init__(self, dcp: DcpModel, model: Any, assets: Path | None) -> None:
        """Name the tensors as in the folder the model came from, if that still has its weights."""
        self._dcp, self._model = dcp, model
        self._plain = upstream_model(model)
        self._last: tuple[tuple[str, ...], dict[str, torch.Tensor]] = ((), {})
        self._original: HfFolder | None = None
        self._made_of = {name: [name] for name in dcp.names if name not in dcp.copies}
        """The tensors of the model that each one is made of."""
        if assets is not None and any(p.suffix == ".safetensors" for p in weight_files(assets)):
            self._original = HfFolder(assets)
            self._made_of = self._as_original(self._original)

    @property
    def tensors(self) -> Mapping[str, FullTensor]:
        """Return the tensors by name."""
        return self

    def release_pages(self) -> None:
        """Release the memory of what has been read."""
        self._dcp.release_pages()

    def outputs(self, folder: Path, dtype: torch.dtype | None) -> list[SafetensorsOutput]:
        """Plan the files: those of the original folder, else as transformers shards them."""
        tensors = []
        for name, made_of in self._made_of.items():
            region = full_slice(self._shape(name))
            stored = StoredTensor(name, self._shape(name), (SliceCopy(name, region, region),))
            tensors.append((stored, dtype or self._dcp.dtype(made_of[0])))
        if self._original is None:
            return shard_outputs(folder, tensors)
        files: dict[str, list[TypedTensor]] = {}
        for stored, kind in tensors:
            files.setdefault(self._original.files[stored.name], []).append((stored, kind))
        return [SafetensorsOutput(folder / name, files[name]) for name in sorted(files)]

    def __getitem__(self, name: str) -> FullTensor:
        made_of = self._made_of[name]
        if self._original is None or not self._converted[name]:
            return self._dcp.full_tensor(made_of[0])
        made = self._reverted(tuple(made_of))[name]
        return FullTensor([Shard(full_slice(made.shape), made.contiguous())])

    def __iter__(self) -> Iterator[str]:
        return iter(self._made_of)

    def __len__(self) -> int:
        return len(self._made_of)

    def _reverted(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Split what transformers fuses; the results are requested one after the other."""
        last = self._last
        if last[0] != names:
            from transformers.core_model_loading import revert_weight_conversion

            values = {name: self._dcp.tensor(name) for name in names}
            self._last = last = (names, revert_weight_conversion(self._plain, values))
        return last[1]

    def _shape(self, name: str) -> tuple[int, ...]:
        if self._original is not None:
            return tuple(self._original.tensors[name].shape)
        return self._dcp.shape(name)

    def _as_original(self, original: HfFolder) -> dict[str, list[str]]:
        meta = {name: tensor.to("meta") for name, tensor in original.tensors.items()}
        found: dict[str, list[str]] = {}
        self._converted: dict[str, bool] = {}
        for conversion in conversions(self._model, meta, self._dcp.names):
            made = [name for name in conversion.apply(meta) if name in self._dcp.names]
            for source in conversion.sources if made else ():
                found[source] = made
                self._converted[source] = conversion.convert is not None
        return {name: found[name] for name in original.tensors if name in found}


def _alpha(folder: Path, adapter: str, given: float | None) -> float:
    """Return the alpha of adapters: as saved with them, else as given."""
    has_config = (folder / ADAPTER_CONFIG).is_file()
    saved = float(read_adapter_config(folder)["lora_alpha"]) if has_config else given
    if saved is None:
        raise ConfigError(
            f"{folder}: has adapters ({adapter}) and no {ADAPTER_CONFIG}: give their --lora-alpha"
        )
    if given is not None and given != saved:
        raise ConfigError(
            f"--lora-alpha {given}: the adapters in {folder} were trained with {saved:g}: leave "
            "the flag out"
        )
    return saved


def _tied(folder: Path) -> dict[str, str]:
    """Return the other names of tied tensors, if a training run saved the checkpoint."""
    return read_state(folder).tied if (folder / STATE_FILE).is_file() else {}


def _without_prefix(
    tensors: Mapping[str, DcpTensor], known: Mapping[str, torch.Tensor]
) -> dict[str, DcpTensor]:
    """Return the tensors of the model: those with the prefix that most known tensors have."""
    tensors = {name: t for name, t in tensors.items() if not name.startswith(OTHERS)}
    found = [
        {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        for prefix in PREFIXES
    ]
    if not known:  # without a known model there is no TransformersModel
        return found[1] or found[2]
    return max(found, key=lambda names: len({n.replace(BASE, "") for n in names} & known.keys()))


def _joined(tensor: FullTensor, shape: tuple[int, ...]) -> torch.Tensor:
    if len(tensor.shards) == 1:
        return aligned(tensor.shards[0].values)
    values = torch.empty(shape, dtype=tensor.dtype)
    for shard in tensor.shards:
        values[to_index(shard.region)] = aligned(shard.values)
    return values
