"""Convert weights without a process group; the kind of --load-dir decides the direction."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from mindspeed.checkpoint.commit import atomic_write_text, fsync_tree, staged_directory
from mindspeed.checkpoint.dcp_writer import DigestWriter
from mindspeed.checkpoint.detection import HF_FOLDER, TRACKER, CheckpointDir, detect
from mindspeed.checkpoint.digests import FileRecord, verify, verify_small, write_digests
from mindspeed.checkpoint.file_io import aligned
from mindspeed.checkpoint.hf_folder import copy_small_files, write_index
from mindspeed.checkpoint.output import (
    DTYPES,
    Progress,
    check_disk_space,
    require_finite,
    write_folder_digests,
    write_outputs,
)
from mindspeed.config import ConfigError
from mindspeed_mm.checkpoint.dcp_model import DcpModel, HfView
from mindspeed_mm.checkpoint.options import ConvertOptions
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.models.transformers_model import read_hf_config
from mindspeed_mm.models.weights import HfWeights

RELEASE = "release"


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    folder: Path
    tensors: int
    nbytes: int


def convert(options: ConvertOptions, progress: Progress | None = None) -> Converted:
    """Read --load-dir and write --save-dir, atomically."""
    for flag, path in (("--load-dir", options.load_dir), ("--save-dir", options.save_dir)):
        if not path:
            raise ConfigError(f"{flag} is missing: give a directory")
    found = detect(options.load_dir)
    for folder in (found.folder, found.config_folder):
        verify_small(folder, enabled=not options.no_verify)
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
    model = _meta_model(options, folder)
    known = _known(model)
    source = HfWeights(folder, model, known)
    source.check()
    _check_shapes({name: tuple(t.shape) for name, t in source.shapes.items()}, known, folder)
    # In training, the model of transformers lies in the `model` of TransformersModel.
    prefix = "model." if model is None else "model.model."
    verify(folder, enabled=not options.no_verify, is_expected=False)
    with staged_directory(root / RELEASE, options.overwrite) as staging:
        check_disk_space(source.nbytes, root)
        written = write_dcp(
            staging, source, prefix, _dtype(options), progress, check_finite=options.check_finite
        )
        write_digests(staging, written, {"kind": "converted"})
    copy_small_files(folder, root / HF_FOLDER)
    write_digests(root / HF_FOLDER, {}, {"kind": "config"})
    fsync_tree(root / HF_FOLDER)
    atomic_write_text(root / TRACKER, f"{RELEASE}\n")
    return Converted(root / RELEASE, len(source.shapes), source.nbytes)


def _to_hf(options: ConvertOptions, found: CheckpointDir, progress: Progress | None) -> Converted:
    assets = Path(options.model_assets_dir) if options.model_assets_dir else found.config_folder
    if options.model_assets_dir and not (Path(options.model_assets_dir) / "config.json").is_file():
        raise ConfigError(
            f"--model-assets-dir {options.model_assets_dir}: has no config.json: give the Hugging "
            "Face folder of the model"
        )
    model = None if assets is None else _meta_model(options, assets)
    known = _known(model)
    weights = DcpModel(found.folder, known, options.lora_alpha)
    _check_shapes({name: weights.shape(name) for name in known}, known, found.folder)
    source = HfView(weights, model, assets)
    final = Path(options.save_dir)
    verify(found.folder, enabled=not options.no_verify, ranges=weights.ranges)
    with staged_directory(final, options.overwrite) as staging:
        outputs = source.outputs(staging, _dtype(options))
        written = write_outputs(
            outputs, source, final.parent, progress, check_finite=options.check_finite
        )
        write_index(staging, outputs)
        if assets is not None:
            copy_small_files(assets, staging, outputs[0].tensors[0][1])
        write_folder_digests(staging, written, outputs)
    tensors = [tensor for output in outputs for tensor in output.tensors]
    return Converted(final, len(tensors), sum(output.nbytes for output in outputs))


def _meta_model(options: ConvertOptions, folder: Path) -> Any:
    """Build the model on the meta device; None if the folder has no config.json."""
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


def _check_shapes(
    shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, torch.Tensor], folder: Path
) -> None:
    """Raise if the shapes of the weights are not those of the config."""
    for name, shape in shapes.items():
        if name in known and tuple(known[name].shape) != shape:
            raise ConfigError(
                f"{folder}: {name} has the shape {shape}, config.json makes it "
                f"{tuple(known[name].shape)}: it is not the config of these weights"
            )


def _dtype(options: ConvertOptions) -> torch.dtype | None:
    return DTYPES[options.params_dtype] if options.params_dtype else None


def write_dcp(
    folder: Path,
    source: HfWeights,
    prefix: str,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    *,
    check_finite: bool = False,
) -> dict[str, FileRecord]:
    """Write every tensor under its name with a prefix, and return the digests of the files.

    No process group is needed.
    """
    state = {prefix + name: _typed(tensor, dtype) for name, tensor in source.shapes.items()}
    planner = _StreamingPlanner(source, prefix, dtype, progress, check_finite)
    writer = DigestWriter(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # not initialized, on purpose
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    return writer.files


class _StreamingPlanner(DefaultSavePlanner):
    """Plans with meta tensors and reads the values when they are written."""

    def __init__(
        self,
        source: HfWeights,
        prefix: str,
        dtype: torch.dtype | None,
        progress: Progress | None,
        check_finite: bool,
    ) -> None:
        super().__init__()
        self._check_finite = check_finite
        self._source, self._prefix, self._dtype = source, prefix, dtype
        self._progress = progress

    def resolve_data(self, write_item: Any) -> torch.Tensor:
        """Read a tensor."""
        values = self._source.read(write_item.index.fqn.removeprefix(self._prefix))
        if self._progress is not None:
            self._progress(values.nbytes, self._source.nbytes)
        typed = _typed(aligned(values), self._dtype)
        if self._check_finite:
            require_finite(write_item.index.fqn, typed)
        return typed


def _typed(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
