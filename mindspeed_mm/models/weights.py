"""Weights of a Hugging Face folder for a model that may be sharded, one tensor at a time."""

import os
from collections.abc import Iterable

import torch
from torch import nn

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.source import check_names
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.hf_folder import HfFolder
from mindspeed_mm.models.initialization import initialize
from mindspeed_mm.models.names import ignored, recipes
from mindspeed_mm.models.shards import fill, materialize, meta_parameters

__all__ = ["initialize", "load_pretrained", "materialize", "meta_parameters"]

BASE, ADAPTER = ".base_layer", ".lora_"
"""What peft puts into the names of a layer that has an adapter, and of the adapter."""


def load_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True
) -> None:
    """Fill a model, sharded or not, from the safetensors of a Hugging Face folder.

    Each rank reads its own part only. A tensor that is missing, has no place or has another shape
    is an error; with strict=False only another shape is.
    """
    if isinstance(model, MultiModalModule):
        model = model.unwrapped()
    targets = weight_targets(model)
    source = HfFolder(folder)
    filled: set[int] = set()
    found, unknown = [], []
    for recipe in recipes(model, source.tensors, targets):
        for name, values in recipe.apply(source.tensors).items():
            target = targets.get(name)
            if target is None:
                unknown += [] if ignored(model, name) else [name]
            elif id(target) not in filled:  # of tied tensors, the first one counts
                _put(name, target, values, source)
                filled.add(id(target))
                found.append(name)
            source.has_read(values.nbytes)
    source.let_go()
    missing = [name for name, target in targets.items() if id(target) not in filled]
    missing = _untied(model, missing, targets)
    if strict:
        check_names([*found, *unknown], [*found, *missing], str(folder))


def weight_targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a file of weights holds, by the names of a model without adapters."""
    state = model.state_dict(keep_vars=True)
    return {name.replace(BASE, ""): t for name, t in state.items() if ADAPTER not in name}


def _put(name: str, target: torch.Tensor, values: torch.Tensor, source: HfFolder) -> None:
    if target.shape != values.shape:
        raise ConfigError(
            f"{source.folder}: {name} has the shape {tuple(values.shape)}, the model makes it "
            f"{tuple(target.shape)} (is the config that of these weights?)"
        )
    if values.is_floating_point() != target.is_floating_point():
        raise ConfigError(
            f"{source.folder}: {name} holds {values.dtype}, the model {target.dtype}: "
            "quantized weights are not served"
        )
    fill(target, values)


def _untied(
    model: nn.Module, missing: Iterable[str], targets: dict[str, torch.Tensor]
) -> list[str]:
    """Copy the embedding into a head that a file does not have because it was tied to it."""
    left = list(missing)
    ties = getattr(model, "_tied_weights_keys", None)
    for name, original in ties.items() if isinstance(ties, dict) else ():
        if name in left and original in targets and original not in left:
            with torch.no_grad():
                targets[name].copy_(targets[original])
            left.remove(name)
    return left
