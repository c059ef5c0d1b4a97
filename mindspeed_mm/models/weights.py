"""Weights of a Hugging Face folder for a model that may be sharded, one tensor at a time."""

import os
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from mindspeed.config import ConfigError
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.hf_weights import HfWeights
from mindspeed_mm.models.initialization import initialize, initialize_adapters
from mindspeed_mm.models.shards import fill, give_memory, meta_parameters, own_experts

__all__ = ["check_pretrained", "initialize", "load_pretrained", "materialize", "meta_parameters"]

BASE, ADAPTER = ".base_layer", ".lora_"
"""What peft puts into the names of a layer that has an adapter, and of the adapter."""


def materialize(
    model: nn.Module, device: torch.device | None = None, *, offload: bool | None = None
) -> None:
    """Give parameters on meta memory, not numbers, except adapters; bring all else to the device.

    Without a device: the current one, or host memory for the shards of a model that offloads,
    which a model with FSDP2Mixin knows itself.
    """
    empty = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    give_memory(model, device, _offloads(model) if offload is None else offload)
    initialize_adapters(model, empty)  # no folder has these


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
    source, copied = _matched(model, targets, folder, strict)
    owners = dict(model.named_modules())
    for name in source.shapes:
        owner = owners.get(name.rpartition(".")[0], model)
        fill(targets[name], own_experts(owner, source.read(name)))
    for name, original in copied.items():
        with torch.no_grad():
            targets[name].copy_(targets[original])
    source.folder.release_pages()


def check_pretrained(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Refuse a folder whose weights do not fit a model, which may be on meta; read none of them."""
    _matched(model, weight_targets(model), folder, strict=True)


def weight_targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a file of weights holds, by the names of a model without adapters."""
    state = model.state_dict(keep_vars=True)
    return {name.replace(BASE, ""): t for name, t in state.items() if ADAPTER not in name}


def _matched(
    model: nn.Module,
    targets: Mapping[str, torch.Tensor],
    folder: str | os.PathLike[str],
    strict: bool,
) -> tuple[HfWeights, dict[str, str]]:
    """Return the weights for a model, all of which fit, and the heads to copy from embeddings."""
    source = HfWeights(folder, model, targets)
    copied = _untied(model, source.missing, targets)
    source.missing = [name for name in source.missing if name not in copied]
    if strict:
        source.check()
    owners = dict(model.named_modules())
    for name, values in source.shapes.items():
        owner = owners.get(name.rpartition(".")[0], model)
        _must_fit(name, targets[name], own_experts(owner, values), folder)
    return source, copied


def _must_fit(
    name: str, target: torch.Tensor, values: torch.Tensor, folder: str | os.PathLike[str]
) -> None:
    if target.shape != values.shape:
        raise ConfigError(
            f"{folder}: {name} has the shape {tuple(values.shape)}, the model makes it "
            f"{tuple(target.shape)} (is the config that of these weights?)"
        )
    if values.is_floating_point() != target.is_floating_point():
        raise ConfigError(
            f"{folder}: {name} holds {values.dtype}, the model {target.dtype}: quantized weights "
            "are not served"
        )


def _untied(
    model: nn.Module, missing: Sequence[str], targets: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Return the heads that a folder lacks because they were tied, with their embeddings."""
    ties = getattr(model, "_tied_weights_keys", None)
    known = ties.items() if isinstance(ties, dict) else ()
    return {n: o for n, o in known if n in missing and o in targets and o not in missing}


def _offloads(model: nn.Module) -> bool:
    return any(
        getattr(getattr(module, "fsdp2_config", None), "offload_to_cpu", False)
        for module in model.modules()
    )
