"""Convert weights without a process group: what is read decides which way."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed.checkpoint.digests import verify, verify_small, write_digests
from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.commit import flush_tree, write_file, written_aside
from mindspeed_llm.checkpoint.conversion import DTYPES
from mindspeed_llm.checkpoint.detection import HF_FOLDER, TRACKER, Found, detect
from mindspeed_llm.checkpoint.hf_target import copy_small_files, write_index
from mindspeed_llm.checkpoint.output import Progress, write_folder_digests, write_outputs
from mindspeed_mm.checkpoint.dcp_model import DcpModel
from mindspeed_mm.checkpoint.dcp_writer import write_dcp
from mindspeed_mm.checkpoint.hf_view import HfView
from mindspeed_mm.checkpoint.options import ConvertOptions
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.hf_weights import HfWeights
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.models.transformers_model import read_hf_config

RELEASE = "release"


@dataclass(frozen=True)
class Converted:
    """What a conversion has done."""

    folder: Path
    tensors: int
    nbytes: int


def convert(options: ConvertOptions, progress: Progress | None = None) -> Converted:
    """Read --load-dir and write --save-dir; nothing appears there unless all of it does."""
    for flag, path in (("--load-dir", options.load_dir), ("--save-dir", options.save_dir)):
        if not path:
            raise ConfigError(f"{flag} is missing: give a directory")
    found = detect(options.load_dir)
    for place in (found.folder, found.config_folder):
        verify_small(place, enabled=not options.no_verify)
    if found.kind == "mcore":
        raise ConfigError(
            f"{options.load_dir}: is a Megatron checkpoint: use mindspeed-llm convert"
        )
    with torch.no_grad():
        if found.kind == "hf":
            return _to_dcp(options, found.folder, progress)
        return _to_hf(options, found, progress)


def _to_dcp(options: ConvertOptions, folder: Path, progress: Progress | None) -> Converted:
    root = Path(options.save_dir)
    if (root / TRACKER).exists() and not options.overwrite:
        raise ConfigError(
            f"{root}: holds a checkpoint already: choose another --save-dir or give --overwrite"
        )
    model = _skeleton(options, folder)
    known = _known(model)
    source = HfWeights(folder, model, known)
    source.check()
    _must_match({name: tuple(t.shape) for name, t in source.shapes.items()}, known, folder)
    # In training, the model of transformers lies in the `model` of TransformersModel.
    prefix = "model." if model is None else "model.model."
    verify(folder, enabled=not options.no_verify, is_expected=False)
    with written_aside(root / RELEASE, options.overwrite) as aside:
        _must_fit(source.nbytes, root)
        written = write_dcp(
            aside, source, prefix, _dtype(options), progress, check_finite=options.check_finite
        )
        write_digests(aside, written, {"kind": "converted"})
    copy_small_files(folder, root / HF_FOLDER)
    write_digests(root / HF_FOLDER, {}, {"kind": "config"})
    flush_tree(root / HF_FOLDER)
    write_file(root / TRACKER, f"{RELEASE}\n")
    return Converted(root / RELEASE, len(source.shapes), source.nbytes)


def _to_hf(options: ConvertOptions, found: Found, progress: Progress | None) -> Converted:
    assets = Path(options.model_assets_dir) if options.model_assets_dir else found.config_folder
    if options.model_assets_dir and not (Path(options.model_assets_dir) / "config.json").is_file():
        raise ConfigError(
            f"--model-assets-dir {options.model_assets_dir}: has no config.json: give the Hugging "
            "Face folder of the model"
        )
    model = None if assets is None else _skeleton(options, assets)
    known = _known(model)
    dcp = DcpModel(found.folder, known, options.lora_alpha)
    _must_match({name: dcp.shape(name) for name in known}, known, found.folder)
    source = HfView(dcp, model, assets)
    final = Path(options.save_dir)
    verify(found.folder, enabled=not options.no_verify, ranges=dcp.ranges)
    with written_aside(final, options.overwrite) as aside:
        outputs = source.outputs(aside, _dtype(options))
        written = write_outputs(
            outputs, source, final.parent, progress, check_finite=options.check_finite
        )
        write_index(aside, outputs)
        if assets is not None:
            copy_small_files(assets, aside, outputs[0].tensors[0][1])
        write_folder_digests(aside, written, outputs)
    tensors = [tensor for output in outputs for tensor in output.tensors]
    return Converted(final, len(tensors), sum(output.nbytes for output in outputs))


def _skeleton(options: ConvertOptions, folder: Path) -> Any:
    """Build the model without weights; None for a folder that is not of transformers."""
    if options.model_id is None and not (folder / "config.json").is_file():
        return None
    config = ModelConfig(
        model_id=options.model_id,
        init_from_hf_path=str(folder),
        trust_remote_code=options.trust_remote_code,
    )
    hf_config = read_hf_config(config)
    model_class: Any = ModelHub.build(config, hf_config)
    with torch.device("meta"):
        return model_class._from_config(hf_config)


def _known(model: Any) -> dict[str, torch.Tensor]:
    return {} if model is None else dict(model.state_dict(keep_vars=True))


def _must_match(
    shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, torch.Tensor], folder: Path
) -> None:
    """Refuse weights that are not of the model of the config, which would be written with them."""
    for name, shape in shapes.items():
        if name in known and tuple(known[name].shape) != shape:
            raise ConfigError(
                f"{folder}: {name} has the shape {shape}, config.json makes it "
                f"{tuple(known[name].shape)}: it is not the config of these weights"
            )


def _dtype(options: ConvertOptions) -> torch.dtype | None:
    return DTYPES[options.params_dtype] if options.params_dtype else None


def _must_fit(needed: int, disk: Path) -> None:
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise ConfigError(
            f"{disk}: {needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free: free some "
            "space or choose another --save-dir"
        )
