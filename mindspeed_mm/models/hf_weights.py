"""The weights of a Hugging Face folder under the names of a model, made when they are asked for."""

import os
from collections.abc import Mapping

import torch
from torch import nn

from mindspeed.checkpoint.assembly import check_names
from mindspeed_mm.models.hf_folder import HfFolder
from mindspeed_mm.models.names import Recipe, ignored, recipes
from mindspeed_mm.models.shards import same_tensors


class HfWeights:
    """The tensors for a model, of which none is in memory before `read`."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module | None,
        known: Mapping[str, torch.Tensor],
    ) -> None:
        """Map a folder; `known` are the tensors of the model, without a model everything fits."""
        self.folder = HfFolder(folder)
        self.shapes: dict[str, torch.Tensor] = {}
        """Every tensor that has a place in the model, on meta; of tied ones the first."""
        self.unexpected: list[str] = []
        self._recipes: dict[str, Recipe] = {}
        self._made: dict[str, torch.Tensor] = {}
        tied = same_tensors(known)
        meta = {name: t.to("meta") for name, t in self.folder.tensors.items()}
        for recipe in recipes(model, meta, known):
            for name, values in recipe.apply(meta).items():
                if model is None or name in known:
                    if not any(other in self.shapes for other in tied.get(name, ())):
                        self.shapes[name] = values
                        self._recipes[name] = recipe
                elif not ignored(model, name):
                    self.unexpected.append(name)
        self.missing = [n for n in known if not any(other in self.shapes for other in tied[n])]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.shapes.values())

    def check(self) -> None:
        """Refuse a folder in which a tensor is missing, or is none of the model."""
        where = str(self.folder.folder)
        check_names([*self.shapes, *self.unexpected], [*self.shapes, *self.missing], where)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, mostly a view; what was made with it is kept until another is asked."""
        if name not in self._made:
            self._made = self._recipes[name].apply(self.folder.tensors)
        values = self._made.pop(name)
        self.folder.has_read(values.nbytes)
        return values
