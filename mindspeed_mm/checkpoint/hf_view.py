"""A checkpoint seen under the names, and in the files, that a Hugging Face folder has."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.checkpoint.assembly import Part, Stored, Tile, Whole
from mindspeed_llm.checkpoint.boxes import whole
from mindspeed_llm.checkpoint.hf_source import weight_files
from mindspeed_llm.checkpoint.hf_target import in_shards
from mindspeed_llm.checkpoint.output import SafetensorsOutput
from mindspeed_mm.checkpoint.dcp_model import DcpModel
from mindspeed_mm.models.hf_folder import HfFolder
from mindspeed_mm.models.names import as_in_transformers, recipes


class HfView(Mapping[str, Whole]):
    """Every tensor of a Hugging Face folder, made from the checkpoint when it is asked for."""

    def __init__(self, dcp: DcpModel, model: Any, assets: Path | None) -> None:
        """Name the tensors as in the folder the model came from, if that still has its weights."""
        self._dcp, self._model = dcp, model
        self._plain = as_in_transformers(model)
        self._last: tuple[tuple[str, ...], dict[str, torch.Tensor]] = ((), {})
        self._original: HfFolder | None = None
        self._made_of = {name: [name] for name in dcp.names if name not in dcp.copies}
        """The tensors of the model that each one is made of."""
        if assets is not None and any(p.suffix == ".safetensors" for p in weight_files(assets)):
            self._original = HfFolder(assets)
            self._made_of = self._as_original(self._original)

    @property
    def wholes(self) -> Mapping[str, Whole]:
        """Return the tensors by name."""
        return self

    def let_go(self) -> None:
        """Give back the memory of what has been read."""
        self._dcp.let_go()

    def outputs(self, folder: Path, dtype: torch.dtype | None) -> list[SafetensorsOutput]:
        """Plan the files: those that the model came in, else such as transformers writes."""
        tensors = []
        for name, made_of in self._made_of.items():
            box = whole(self._shape(name))
            stored = Stored(name, self._shape(name), (Tile(name, box, box),))
            tensors.append((stored, dtype or self._dcp.dtype(made_of[0])))
        if self._original is None:
            return in_shards(folder, tensors)
        files: dict[str, list[tuple[Stored, torch.dtype]]] = {}
        for stored, kind in tensors:
            files.setdefault(self._original.files[stored.name], []).append((stored, kind))
        return [SafetensorsOutput(folder / name, files[name]) for name in sorted(files)]

    def __getitem__(self, name: str) -> Whole:
        made_of = self._made_of[name]
        if self._original is None or not self._converted[name]:
            return self._dcp.whole(made_of[0])
        made = self._reverted(tuple(made_of))[name]
        return Whole([Part(whole(made.shape), made.contiguous())])

    def __iter__(self) -> Iterator[str]:
        return iter(self._made_of)

    def __len__(self) -> int:
        return len(self._made_of)

    def _reverted(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Take apart what transformers joins; all that comes out is wanted one after the other."""
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
        for recipe in recipes(self._model, meta, self._dcp.names):
            made = [name for name in recipe.apply(meta) if name in self._dcp.names]
            for source in recipe.sources if made else ():
                found[source] = made
                self._converted[source] = recipe.convert is not None
        return {name: found[name] for name in original.tensors if name in found}
