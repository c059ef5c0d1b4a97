"""Read the weights of a torch_dist (torch.distributed.checkpoint) training checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import torch

from mindspeed.checkpoint.digests import Ranges
from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.assembly import Part, Whole
from mindspeed_llm.checkpoint.boxes import Box, intersection, moved, sizes, slices, whole
from mindspeed_llm.checkpoint.dcp_files import DcpFiles
from mindspeed_llm.checkpoint.dcp_metadata import DcpTensor, ranges_of, read_metadata
from mindspeed_llm.checkpoint.mcore_source import seen_shape
from mindspeed_llm.checkpoint.placement import FUSED_LATENT_NORMS, FUSED_NORMS
from mindspeed_llm.checkpoint.source import Source, check_names
from mindspeed_llm.models.families import family_named
from mindspeed_llm.models.rules import Cut
from mindspeed_llm.models.shape import ModelShape
from mindspeed_llm.models.table import Weight

PARTS = ("embedding.", "decoder.", "output_layer.", "mtp.")
"""Beginnings of the names of weights; others belong to the optimizer and the training."""
PREFIXES = ("", "model.", "module.", "model.module.")
ADAPTERS = "_lora"
"""Behind the name of a layer, the name of its LoRA adapters."""


def open_dcp(folder: Path, shape: ModelShape) -> Source:
    """Map the weights of an iteration, whatever layout it was saved in."""
    stored = read_metadata(folder)
    tensors = _weights_only(stored)
    if not tensors:
        raise ConfigError(f"{folder}: has no weights: no name begins with {', '.join(PARTS)}")
    shape = seen_shape(shape, "\n".join(tensors))
    files = DcpFiles(folder)
    found, used = {}, set()
    for weight in family_named(shape.family).table.weights(shape):
        name, leading = _place_of(weight, tensors, folder)
        used.add(name)
        _check(folder, name, tensors[name], weight, len(leading))
        found[weight.name] = Whole(list(_parts(tensors[name], leading, files)))
    tied_copies = {"output_layer.weight"} if shape.tied else set()
    check_names(set(tensors) - tied_copies, used - tied_copies, str(folder))
    return Source(shape, found, files.opened(), ranges_of(stored, _model_tensors(stored).values()))


def read_adapters(folder: Path) -> dict[str, torch.Tensor]:
    """Read the adapters of an iteration, by the names that single layers give them."""
    files, found = DcpFiles(folder), {}
    for name, tensor in _model_tensors(read_metadata(folder)).items():
        if not _is_adapter(name):
            continue
        values = torch.empty(tensor.shape, dtype=files.values(tensor.chunks[0]).dtype)
        for part in _parts(tensor, (), files):
            values[slices(part.place)] = part.values
        start, _, rest = name.partition(".layers.")
        if rest.partition(".")[0].isdigit():
            found[name] = values
        else:  # all layers in one tensor
            found |= {f"{start}.layers.{i}.{rest}": one for i, one in enumerate(values)}
    return found


def adapter_ranges(folder: Path) -> Ranges:
    """Return where the adapters of an iteration are."""
    stored = read_metadata(folder)
    return ranges_of(stored, (t for n, t in _model_tensors(stored).items() if _is_adapter(n)))


def _weights_only(tensors: dict[str, DcpTensor]) -> dict[str, DcpTensor]:
    return {n: t for n, t in _model_tensors(tensors).items() if not _is_adapter(n)}


def _is_adapter(name: str) -> bool:
    return f"{ADAPTERS}." in name


def _model_tensors(tensors: dict[str, DcpTensor]) -> dict[str, DcpTensor]:
    """Return what belongs to the model without the prefix that wrappers give the names."""
    for prefix in PREFIXES:
        starts = tuple(prefix + part for part in PARTS)
        found = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(starts)}
        if found:
            return {n: t for n, t in found.items() if not n.endswith("_extra_state")}
    return {}


def _place_of(
    weight: Weight, tensors: dict[str, DcpTensor], folder: Path
) -> tuple[str, tuple[int, ...]]:
    """Return the tensor that holds a weight, and the weight's numbers in its leading dimensions."""
    tried = []
    for name in _spellings(weight.name):
        leading: tuple[int, ...] = ()
        if weight.expert is not None:
            name = name.replace(f".experts.{weight.expert}.", ".experts.experts.")
            leading = (weight.expert,)
        part, dot, rest = name.partition(".layers.")
        number, _, inner = rest.partition(".")
        stacked = f"{part}.layers.{inner}" if dot else name
        tried.append(name)
        if name in tensors:
            return name, leading
        if stacked in tensors:  # all layers in one tensor
            return stacked, (int(number), *leading)
    raise ConfigError(f"{folder}: {weight.name} is missing: looked for {' and '.join(tried)}")


def _spellings(name: str) -> Iterator[str]:
    """Yield the names that different layer specs give a weight."""
    yield name
    for norms in (FUSED_NORMS, FUSED_LATENT_NORMS):
        for plain, fused in norms.items():
            if name.endswith("." + plain):
                yield name.removesuffix(plain) + fused
    if ".transformer_layer." in name:
        yield name.replace(".transformer_layer.", ".mtp_model_layer.")


def _check(folder: Path, name: str, tensor: DcpTensor, weight: Weight, leading: int) -> None:
    shape = tensor.shape[leading:]
    is_padded = weight.cut is Cut.VOCABULARY and shape[:1] >= weight.shape[:1]
    if shape != weight.shape and not (is_padded and shape[1:] == weight.shape[1:]):
        raise ConfigError(
            f"{folder}: {name} has the shape {shape}, the config makes it {weight.shape}"
        )


def _parts(tensor: DcpTensor, leading: tuple[int, ...], files: DcpFiles) -> Iterator[Part]:
    """Yield the parts of a weight that the chunks of its tensor hold."""
    wanted: Box = (*((n, n + 1) for n in leading), *whole(tensor.shape[len(leading) :]))
    for chunk in tensor.chunks:
        if (shared := intersection(wanted, chunk.box)) is not None:
            values = files.values(chunk)[slices(moved(shared, chunk.box, whole(sizes(chunk.box))))]
            place = shared[len(leading) :]
            yield Part(place, values.reshape(sizes(place)))
