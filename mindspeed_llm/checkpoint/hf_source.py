"""Read the weights of an HF model directory."""

import json
from pathlib import Path

import torch

from mindspeed.config import ConfigError, one_of
from mindspeed_llm.checkpoint.assembly import Part, Whole
from mindspeed_llm.checkpoint.boxes import slices
from mindspeed_llm.checkpoint.detection import INDEXES, SINGLES
from mindspeed_llm.checkpoint.mapped_file import MappedFile
from mindspeed_llm.checkpoint.pt_file import read_pt
from mindspeed_llm.checkpoint.safetensors_file import read_safetensors
from mindspeed_llm.checkpoint.source import Source, check_names, check_shape, only_tensors
from mindspeed_llm.models.families import family_named, read_shape
from mindspeed_llm.models.hf_config import HfConfig
from mindspeed_llm.models.shape import ModelShape

LARGEST_INDEX = 256 << 20


def open_hf(folder: Path, named: str | None = None, shape: ModelShape | None = None) -> Source:
    """Map the weights of a directory; `named` is a family for configs that do not tell theirs."""
    tensors, files = _tensors(folder)
    if shape is None:
        _refuse_quantized(folder)
        shape = read_shape(folder, tensors, named)
    return Source(shape, _wholes(folder, shape, tensors), files)


def weight_files(folder: Path) -> list[Path]:
    """Return the files with weights, all of which are there; raise where one is missing."""
    for name in INDEXES:
        if (folder / name).is_file():
            return _indexed(folder / name)
    for name in SINGLES:
        if (folder / name).is_file():
            return [folder / name]
    return sorted(folder.glob("*.safetensors"))


def _indexed(index: Path) -> list[Path]:
    try:
        if index.stat().st_size > LARGEST_INDEX:
            raise ConfigError(f"{index}: is larger than {LARGEST_INDEX >> 20} MiB")
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{index}: has no valid weight_map: download it again") from None
    except OSError as error:
        raise ConfigError(f"{index}: cannot be read ({error.strerror})") from None
    if wrong := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise ConfigError(f"{index}: refused: {wrong[0]!r} is not the name of a file beside it")
    paths = [index.parent / name for name in sorted(names)]
    if missing := [path.name for path in paths if not path.is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(
            f"{index.parent}: {', '.join(missing[:3])}{more} missing ({len(missing)} of the "
            f"{len(paths)} files that {index.name} names): finish the download"
        )
    return paths


def _tensors(folder: Path) -> tuple[dict[str, torch.Tensor], list[MappedFile]]:
    tensors: dict[str, torch.Tensor] = {}
    files: list[MappedFile] = []
    paths = weight_files(folder)
    if not paths:
        raise ConfigError(
            f"{folder}: has no weights: looked for {one_of((*INDEXES, *SINGLES, '*.safetensors'))}"
        )
    for path in paths:
        if path.suffix == ".bin":
            found = only_tensors(read_pt(path), str(path))
        else:
            files.append(MappedFile(path))
            found = read_safetensors(files[-1])
        if twice := tensors.keys() & found.keys():
            raise ConfigError(f"{path}: {min(twice)} is also in another file of {folder}")
        tensors |= found
    return tensors, files


def _wholes(folder: Path, shape: ModelShape, tensors: dict[str, torch.Tensor]) -> dict[str, Whole]:
    """Take each weight from the HF tensors that its line of the table names."""
    table = family_named(shape.family).table
    copies = set(table.hf_copies(shape)) | ({"lm_head.weight"} if shape.tied else set())
    left = {name for name in tensors if not name.endswith(table.ignored) and name not in copies}
    weights = list(table.weights(shape))
    wanted = {link.hf for weight in weights for link in weight.links}
    check_names(left, wanted, str(folder))
    found = {}
    for weight in weights:
        sizes = {link.hf: tuple(stop for _, stop in link.at) for link in weight.links}
        for name, size in sizes.items():  # the last link of each tensor ends where it ends
            check_shape(str(folder), name, tensors[name], size)
        parts = [Part(link.place, tensors[link.hf][slices(link.at)]) for link in weight.links]
        found[weight.name] = Whole(parts)
    return found


def _refuse_quantized(folder: Path) -> None:
    config = HfConfig.read(folder)
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else "unknown"
        raise ConfigError(
            f"{config.source}: the weights are quantized ({method}): convert a bf16, fp16 or fp32 "
            "version of the model"
        )
