"""Convert a checkpoint: open one, plan the files of another, stream the weights across."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mindspeed.checkpoint.commit import atomic_write_text, fsync_tree, staged_directory
from mindspeed.checkpoint.detection import HF_FOLDER, TRACKER, CheckpointDir, detect
from mindspeed.checkpoint.digests import verify_small, write_digests
from mindspeed.checkpoint.hf_folder import copy_small_files, weight_files, write_index
from mindspeed.checkpoint.output import (
    DTYPES,
    Output,
    Progress,
    write_folder_digests,
    write_outputs,
)
from mindspeed.checkpoint.safetensors_file import is_export
from mindspeed.config import ConfigError
from mindspeed.distributed.parallel_dims import padded_vocabulary
from mindspeed_llm.checkpoint.hf import hf_outputs
from mindspeed_llm.checkpoint.layout import Layout, LayoutRequest
from mindspeed_llm.checkpoint.loading import config_folder, open_source, verify_source
from mindspeed_llm.checkpoint.mcore import ITERATION, mcore_outputs
from mindspeed_llm.checkpoint.options import ConvertOptions
from mindspeed_llm.checkpoint.sharding import NameStyle
from mindspeed_llm.checkpoint.source import WeightSource
from mindspeed_llm.models.config import contradictions, refuse_contradictions
from mindspeed_llm.models.hf_config import set_num_labels

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    family: str
    folder: Path
    files: int
    nbytes: int
    dtype: str


def convert(options: ConvertOptions, progress: Progress | None = None) -> Converted:
    """Read --load-dir and write --save-dir, atomically."""
    _check_given(options)
    found = detect(options.load_dir)
    if (found.kind == "hf") != (options.load_model_type == "hf"):
        is_hf = "an HF model" if found.kind == "hf" else "a Megatron checkpoint"
        raise ConfigError(
            f"--load-model-type {options.load_model_type}: {options.load_dir} is {is_hf}"
        )
    if options.save_model_type == "hf":
        if options.load_model_type == "hf":
            raise ConfigError("--load-model-type hf and --save-model-type hf: one must be mg")
        return _to_hf(options, found, progress)
    if options.model_role is not None:
        raise ConfigError(
            f"--model-role {options.model_role}: is exported as an HF model only: give "
            "--save-model-type hf"
        )
    return _to_mcore(options, found, progress)


def _check_given(options: ConvertOptions) -> None:
    for flag, path in (("--load-dir", options.load_dir), ("--save-dir", options.save_dir)):
        if not path:
            raise ConfigError(f"{flag} is missing: give a directory")
    if options.hf_experts != "each" and options.save_model_type != "hf":
        raise ConfigError("--hf-experts fused: is for --save-model-type hf: drop it")
    if Path(options.save_dir).is_file():
        raise ConfigError(f"--save-dir {options.save_dir}: is a file: give a directory")
    if options.make_vocab_size_divisible_by < 1:
        given = options.make_vocab_size_divisible_by
        raise ConfigError(f"--make-vocab-size-divisible-by {given}: it must be at least 1")


def _check_target(options: ConvertOptions, root: Path) -> None:
    """Raise if a checkpoint would be replaced, except one of a conversion with --overwrite."""
    if root.resolve() == Path(options.load_dir).resolve():
        raise ConfigError(f"--save-dir {root} is the --load-dir too: choose another directory")
    tracker = root / TRACKER
    if not tracker.exists():
        return
    if not options.overwrite:
        raise ConfigError(
            f"{root}: holds a checkpoint already: choose another --save-dir or give --overwrite"
        )
    if tracker.read_text(encoding="utf-8", errors="replace").strip() != str(ITERATION):
        raise ConfigError(
            f"{root}: holds the checkpoints of a training run, which --overwrite does not replace: "
            "choose another --save-dir"
        )


def _to_mcore(
    options: ConvertOptions, found: CheckpointDir, progress: Progress | None
) -> Converted:
    root = Path(options.save_dir)
    _check_target(options, root)
    configs = config_folder(found, options.hf_cfg_dir)
    _verify_small(options, found.folder, configs)
    source = _open(options, found, configs)
    config, tp = source.config, options.target_tensor_parallel_size
    layout = _requested_layout(options, source)
    if config.moe and config.linear_bias and _style(options).experts == "joined":
        raise ConfigError(
            "--moe-grouped-gemm: the experts have biases, which Megatron's local grouped experts "
            "have not: drop it, or add --transformer-impl transformer_engine"
        )
    rows = padded_vocabulary(config.vocab_size, options.make_vocab_size_divisible_by, tp)
    final = root / f"iter_{ITERATION:07d}"
    verify_source(found, source, enabled=not options.no_verify)
    with staged_directory(final, options.overwrite) as staging:
        outputs = mcore_outputs(staging, source, layout, _style(options), rows, _dtype(options))
        written = write_outputs(outputs, source, root, progress, check_finite=options.check_finite)
        about = {"iteration": ITERATION, "layout": layout.as_plain()}
        write_folder_digests(staging, written, outputs, **about)
    copy_small_files(configs, root / HF_FOLDER)
    write_digests(root / HF_FOLDER, {}, {"kind": "config"})
    fsync_tree(root / HF_FOLDER)
    atomic_write_text(root / TRACKER, str(ITERATION))
    return _converted(source, final, outputs, _dtype(options))


def _to_hf(options: ConvertOptions, found: CheckpointDir, progress: Progress | None) -> Converted:
    final = Path(options.save_dir)
    configs = config_folder(found, options.hf_cfg_dir, final)
    _verify_small(options, found.folder, configs)
    if (final / "config.json").is_file() and not _is_replaceable(weight_files(final)):
        final = final / "mg2hf"
        logger.info("%s is an HF model from elsewhere: writing to %s", options.save_dir, final)
    source = _open(options, found, configs)
    if options.hf_experts != "each" and source.config.moe is None:
        raise ConfigError(f"--hf-experts {options.hf_experts}: the model has no experts: drop it")
    verify_source(found, source, enabled=not options.no_verify)
    with staged_directory(final, options.overwrite) as staging:
        outputs = hf_outputs(staging, source, _dtype(options), experts=options.hf_experts)
        written = write_outputs(
            outputs, source, final.parent, progress, check_finite=options.check_finite
        )
        write_index(staging, outputs)
        copy_small_files(configs, staging, outputs[0].tensors[0][1])
        if options.model_role is not None and source.config.num_labels:
            set_num_labels(staging / "config.json", source.config.num_labels)
        write_folder_digests(staging, written, outputs)
    return _converted(source, final, outputs, _dtype(options))


def _verify_small(options: ConvertOptions, *folders: Path) -> None:
    for folder in folders:
        verify_small(folder, enabled=not options.no_verify)


def _is_replaceable(files: Sequence[Path]) -> bool:
    """Return whether all weights of a model were exported, so that an export may replace it."""
    return all(is_export(path) for path in files)


def _open(options: ConvertOptions, found: CheckpointDir, configs: Path) -> WeightSource:
    noops = options.noop_layers if options.load_model_type == "mg" else ()
    source = open_source(
        found,
        configs,
        named=options.model_type_hf,
        noop_layers=noops,
        role=options.model_role,
    )
    refuse_contradictions(contradictions(options, source.config))
    return source


def _requested_layout(options: ConvertOptions, source: WeightSource) -> Layout:
    request = LayoutRequest(
        tp=options.target_tensor_parallel_size,
        pp=options.target_pipeline_parallel_size,
        ep=options.target_expert_parallel_size,
        etp=options.expert_tensor_parallel_size,
        layers_per_chunk=options.num_layers_per_virtual_pipeline_stage,
        layer_list=options.num_layer_list,
        noop_layers=options.noop_layers,
    )
    return request.layout(source.config)


def _style(options: ConvertOptions) -> NameStyle:
    is_te = options.transformer_impl == "transformer_engine"
    experts = ("numbered" if is_te else "joined") if options.moe_grouped_gemm else "each"
    return NameStyle(
        fuses_norms=is_te,
        experts=experts,
        shards_latent_down=not (is_te or options.join_mla_down_proj),
        fuses_latent_down=options.join_mla_down_proj,
    )


def _dtype(options: ConvertOptions) -> torch.dtype | None:
    return DTYPES[options.params_dtype] if options.params_dtype else None


def _converted(
    source: WeightSource, folder: Path, outputs: Sequence[Output], dtype: torch.dtype | None
) -> Converted:
    kept = next(iter(source.tensors.values())).dtype
    return Converted(
        family=source.config.family,
        folder=folder,
        files=len(outputs),
        nbytes=sum(output.nbytes for output in outputs),
        dtype=str(dtype or kept).removeprefix("torch."),
    )
