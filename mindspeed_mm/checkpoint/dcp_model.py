"""The weights of a model in a torch.distributed.checkpoint; the numbers stay in the files."""

from collections.abc import Mapping
from pathlib import Path

import torch

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.adapters import CONFIG, read_config
from mindspeed_llm.checkpoint.assembly import Part, Whole
from mindspeed_llm.checkpoint.boxes import slices, whole
from mindspeed_llm.checkpoint.dcp_files import DcpFiles
from mindspeed_llm.checkpoint.dcp_metadata import DcpTensor, ranges_of, read_metadata
from mindspeed_llm.checkpoint.mapped_file import aligned
from mindspeed_llm.checkpoint.source import check_names
from mindspeed_llm.training.folders import STATE_FILE, read_progress
from mindspeed_mm.models.shards import same_tensors
from mindspeed_mm.models.weights import ADAPTER, BASE

PREFIXES = ("model.model.", "model.", "")
"""What stands before the names of a model's tensors: training has `model.`, and TransformersModel
keeps the model of transformers in its own `model`."""
OTHERS = ("optimizer.",)


class DcpModel:
    """The tensors by the names that the model has without adapters, which are merged."""

    def __init__(
        self, folder: Path, known: Mapping[str, torch.Tensor], lora_alpha: int | None = None
    ) -> None:
        """Read the description of a checkpoint safely; with `known` ones, they have to be there."""
        self._files = DcpFiles(folder)
        stored = read_metadata(folder)
        self._tensors = _without_prefix(stored, known)
        self.ranges = ranges_of(stored, self._tensors.values())
        """Where they are in the files, which may hold an optimizer as well."""
        adapters = [name for name in self._tensors if ADAPTER in name]
        self._alpha = _alpha(folder, adapters[0], lora_alpha) if adapters else None
        self.names = {n.replace(BASE, ""): n for n in self._tensors if ADAPTER not in n}
        """The tensor in the checkpoint for each of the model."""
        self.copies: set[str] = set()
        """Those that the checkpoint has under the name of a tensor they are tied to."""
        if known:
            tied = same_tensors(known)
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
        """Return the type of a tensor."""
        return self._files.values(self._tensors[self.names[name]].chunks[0]).dtype

    def whole(self, name: str) -> Whole:
        """Return a tensor, as views of files if nothing is to be added to it."""
        stored = self.names[name]
        if not stored.endswith(f"{BASE}.weight"):
            return self._parts(stored)
        merged = self._merged(stored.removesuffix(f"{BASE}.weight"))
        return Whole([Part(whole(merged.shape), merged)])

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in one piece."""
        return _joined(self.whole(name), self.shape(name))

    def let_go(self) -> None:
        """Give back the memory of what has been read."""
        for file in self._files.opened():
            file.let_go()

    def _parts(self, stored: str) -> Whole:
        chunks = self._tensors[stored].chunks
        return Whole([Part(chunk.box, self._files.values(chunk)) for chunk in chunks])

    def _merged(self, layer: str) -> torch.Tensor:
        """Add an adapter to the layer it stands beside."""
        ends = (f"{BASE}.weight", ".lora_A.default.weight", ".lora_B.default.weight")
        base, low, high = (
            _joined(self._parts(layer + end), self._tensors[layer + end].shape) for end in ends
        )
        assert self._alpha is not None
        added = (self._alpha / len(low)) * (high.float() @ low.float())
        return (base.float() + added).to(base.dtype)


def _alpha(folder: Path, adapter: str, given: float | None) -> float:
    """Return the alpha of adapters: the run that trained them tells, or else the user."""
    saved = float(read_config(folder)["lora_alpha"]) if (folder / CONFIG).is_file() else given
    if saved is None:
        raise ConfigError(
            f"{folder}: has adapters ({adapter}) and no {CONFIG}: give their --lora-alpha"
        )
    if given is not None and given != saved:
        raise ConfigError(
            f"--lora-alpha {given}: the adapters in {folder} were trained with {saved:g}: leave "
            "the flag out"
        )
    return saved


def _tied(folder: Path) -> dict[str, str]:
    """Return the other names of tied tensors, if a training saved the checkpoint."""
    return read_progress(folder).tied if (folder / STATE_FILE).is_file() else {}


def _without_prefix(
    tensors: Mapping[str, DcpTensor], known: Mapping[str, torch.Tensor]
) -> dict[str, DcpTensor]:
    """Take the tensors of the model, by the prefix under which most of the known ones are."""
    tensors = {name: t for name, t in tensors.items() if not name.startswith(OTHERS)}
    found = [
        {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        for prefix in PREFIXES
    ]
    if not known:  # a model that nobody knows is not in a TransformersModel
        return found[1] or found[2]
    return max(found, key=lambda names: len({n.replace(BASE, "") for n in names} & known.keys()))


def _joined(tensor: Whole, shape: tuple[int, ...]) -> torch.Tensor:
    if len(tensor.parts) == 1:
        return aligned(tensor.parts[0].values)
    values = torch.empty(shape, dtype=tensor.dtype)
    for part in tensor.parts:
        values[slices(part.place)] = aligned(part.values)
    return values
