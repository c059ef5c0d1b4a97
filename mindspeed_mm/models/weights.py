"""Load the weights of a Hugging Face folder into a model that may be sharded, tensor by tensor.

Names are converted by the rules of transformers, for the model class and every model inside.
"""

import copy
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mindspeed.checkpoint.assembly import check_names
from mindspeed.checkpoint.file_io import MappedFile
from mindspeed.checkpoint.hf_folder import weight_files
from mindspeed.checkpoint.safetensors_file import read_safetensors
from mindspeed.config import ConfigError
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.meta_device import (
    allocate,
    copy_local,
    initialize_adapters,
    local_experts,
    tied_names,
)

Tensors = Mapping[str, torch.Tensor]
BASE, ADAPTER = ".base_layer", ".lora_"
"""What peft adds to the names of a layer that has an adapter, and of the adapter."""
RELEASE_BYTES = 256 << 20
"""Bytes read after which mapped pages are released."""


class HfFolder:
    """The tensors of a Hugging Face folder by name, memory-mapped; `files` maps them to files."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, torch.Tensor] = {}
        self.files: dict[str, str] = {}
        self._mapped: list[MappedFile] = []
        self._unreleased = 0
        for path in _safetensors(self.folder):
            self._mapped.append(MappedFile(path))
            found = read_safetensors(self._mapped[-1])
            if duplicates := self.tensors.keys() & found.keys():
                raise ConfigError(f"{path}: {min(duplicates)} is also in another file of {folder}")
            self.tensors |= found
            self.files |= dict.fromkeys(found, path.name)

    def count_read(self, nbytes: int) -> None:
        """Count bytes that were read; release mapped pages from time to time."""
        self._unreleased += nbytes
        if self._unreleased > RELEASE_BYTES:
            self.release_pages()

    def release_pages(self) -> None:
        """Release the mapped pages that were read."""
        self._unreleased = 0
        for file in self._mapped:
            file.release_pages()


def _safetensors(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder: give one with *.safetensors files")
    paths = weight_files(folder)
    if not paths:
        raise ConfigError(f"{folder}: has no weights: expected *.safetensors")
    if wrong := [path.name for path in paths if path.suffix != ".safetensors"]:
        raise ConfigError(
            f"{folder}: {wrong[0]} is a pickle: save the model as safetensors "
            "(save_pretrained does)"
        )
    return paths


@dataclass
class Conversion:
    """Source tensors that together become one or more tensors of a model."""

    sources: list[str] = field(default_factory=list)
    name: str = ""
    """The tensor of the model, if the source is only renamed."""
    convert: "_Converter | None" = None
    """Computes the tensors of the model from the sources, if renaming is not enough."""

    def apply(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return the tensors of the model."""
        if self.convert is None:
            return {self.name: tensors[self.sources[0]]}
        return self.convert(tensors)


def conversions(
    model: nn.Module | None, sources: Iterable[str], names: Iterable[str]
) -> list[Conversion]:
    """Return the conversions from tensors of a folder; `names` are those of the model."""
    upstream = upstream_model(model)
    if upstream is None:
        return [Conversion([source], source) for source in sources]
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(upstream)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    known = dict.fromkeys(names, True)
    found: dict[str, Conversion] = {}
    converted: dict[str, _Converter] = {}
    for source in sorted(sources, key=dot_natural_key):
        prefix = upstream.base_model_prefix
        name, pattern = rename_source_key(source, renamings, converters, prefix, known)
        if name not in known and source in known:  # a rule for the same name elsewhere
            name, pattern = rename_source_key(source, [], [], prefix, known)
        if pattern is None:
            found[source] = Conversion([source], name)
            continue
        converter = converted.setdefault(name, _Converter(upstream, by_pattern[pattern], name, {}))
        converter.patterns[source] = pattern
        found.setdefault(name, Conversion([], convert=converter)).sources.append(source)
    return list(found.values())


def is_ignored(model: nn.Module, name: str) -> bool:
    """Return whether a tensor of a file that the model lacks may be ignored.

    The model declares it, or it is a buffer that older files contain and the model computes.
    """
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    is_buffer = any(name == buffer for buffer, _ in model.named_buffers())
    return is_buffer or any(re.search(pattern, name) for pattern in patterns)


def upstream_model(model: Any) -> Any:
    """Return a meta-device model of the transformers class of a model, if it has one.

    The rules are written for that class, not for one derived from it or wrapped by FSDP2.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return None
    classes = (c for c in type(model).__mro__ if c.__module__.startswith("transformers.models."))
    upstream = next((c for c in classes if issubclass(c, PreTrainedModel)), None)
    if upstream is None:
        return None
    with torch.device("meta"):
        return upstream._from_config(copy.deepcopy(model.config))


@dataclass(frozen=True)
class _Converter:
    """Runs one converter of transformers over its sources."""

    model: Any
    converter: Any
    name: str
    patterns: dict[str, str]
    """The pattern of the converter that each source matches."""

    def __call__(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for source, pattern in self.patterns.items():
            converter.add_tensor(self.name, source, pattern, tensors[source])
        converted = converter.convert(self.name, model=self.model, config=self.model.config)
        return {k: v[0] if isinstance(v, list) else v for k, v in converted.items()}


class HfWeights:
    """The tensors of a folder under the names of a model; `read` loads one of them."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module | None,
        known: Mapping[str, torch.Tensor],
    ) -> None:
        """Map a folder; `known` are the tensors of the model; without a model all are taken."""
        self.folder = HfFolder(folder)
        self.shapes: dict[str, torch.Tensor] = {}
        """Every tensor of the model, on meta; of tied ones the first."""
        self.unexpected: list[str] = []
        self._conversions: dict[str, Conversion] = {}
        self._converted: dict[str, torch.Tensor] = {}
        tied = tied_names(known)
        meta = {name: t.to("meta") for name, t in self.folder.tensors.items()}
        for conversion in conversions(model, meta, known):
            for name, values in conversion.apply(meta).items():
                if model is None or name in known:
                    if not any(other in self.shapes for other in tied.get(name, ())):
                        self.shapes[name] = values
                        self._conversions[name] = conversion
                elif not is_ignored(model, name):
                    self.unexpected.append(name)
        self.missing = [n for n in known if not any(other in self.shapes for other in tied[n])]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.shapes.values())

    def check(self) -> None:
        """Reject a folder with missing or unexpected tensors."""
        where = str(self.folder.folder)
        check_names([*self.shapes, *self.unexpected], [*self.shapes, *self.missing], where)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, mostly a view; others of its conversion are kept until the next one."""
        if name not in self._converted:
            self._converted = self._conversions[name].apply(self.folder.tensors)
        values = self._converted.pop(name)
        self.folder.count_read(values.nbytes)
        return values


def materialize(
    model: nn.Module, device: torch.device | None = None, *, offload: bool | None = None
) -> None:
    """Allocate parameters on meta, uninitialized except adapters; move all else to the device.

    Without a device: the current one, or host memory for the shards of a model that offloads,
    which a model with FSDP2Mixin knows itself.
    """
    empty = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    allocate(model, device, _offloads(model) if offload is None else offload)
    initialize_adapters(model, empty)  # no folder contains these


def load_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True
) -> None:
    """Load the safetensors of a Hugging Face folder into a model, sharded or not.

    Each rank reads its own shard only. A missing, unexpected or mis-shaped tensor is an error;
    with strict=False only a mis-shaped one is.
    """
    if isinstance(model, MultiModalModule):
        model = model.unwrapped()
    targets = weight_targets(model)
    source, copied = _matched(model, targets, folder, strict)
    owners = dict(model.named_modules())
    for name in source.shapes:
        owner = owners.get(name.rpartition(".")[0], model)
        copy_local(targets[name], local_experts(owner, source.read(name)))
    for name, original in copied.items():
        with torch.no_grad():
            targets[name].copy_(targets[original])
    source.folder.release_pages()


def check_pretrained(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Reject a folder whose weights do not fit a model, which may be on meta; read none of them."""
    _matched(model, weight_targets(model), folder, strict=True)


def weight_targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight file, by the names of a model without adapters."""
    state = model.state_dict(keep_vars=True)
    return {name.replace(BASE, ""): t for name, t in state.items() if ADAPTER not in name}


def _matched(
    model: nn.Module,
    targets: Mapping[str, torch.Tensor],
    folder: str | os.PathLike[str],
    strict: bool,
) -> tuple[HfWeights, dict[str, str]]:
    """Return the checked weights for a model, and the heads to copy from embeddings."""
    source = HfWeights(folder, model, targets)
    copied = _untied(model, source.missing, targets)
    source.missing = [name for name in source.missing if name not in copied]
    if strict:
        source.check()
    owners = dict(model.named_modules())
    for name, values in source.shapes.items():
        owner = owners.get(name.rpartition(".")[0], model)
        _check_fits(name, targets[name], local_experts(owner, values), folder)
    return source, copied


def _check_fits(
    name: str, target: torch.Tensor, values: torch.Tensor, folder: str | os.PathLike[str]
) -> None:
    if target.shape != values.shape:
        raise ConfigError(
            f"{folder}: {name} has shape {tuple(values.shape)}, the model expects "
            f"{tuple(target.shape)}: check that config.json belongs to these weights"
        )
    if values.is_floating_point() != target.is_floating_point():
        raise ConfigError(
            f"{folder}: {name} is {values.dtype}, the model expects {target.dtype}: quantized "
            "weights are not supported"
        )


def _untied(
    model: nn.Module, missing: Sequence[str], targets: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Return the heads that a folder lacks because they were tied, and their embeddings."""
    ties = getattr(model, "_tied_weights_keys", None)
    known = ties.items() if isinstance(ties, dict) else ()
    return {n: o for n, o in known if n in missing and o in targets and o not in missing}


def _offloads(model: nn.Module) -> bool:
    return any(
        getattr(getattr(module, "fsdp2_config", None), "offload_to_cpu", False)
        for module in model.modules()
    )
