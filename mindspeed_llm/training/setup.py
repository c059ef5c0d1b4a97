"""Everything a run needs, made once from its options."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.checkpoint.digests import verify_small
from mindspeed.config import ConfigError, build
from mindspeed.training.save_dir_lock import SaveDirLock, release_on_error
from mindspeed_llm.checkpoint.detection import HF_FOLDER
from mindspeed_llm.models.shape import ModelShape
from mindspeed_llm.training import model
from mindspeed_llm.training.checkpoint import Checkpoints
from mindspeed_llm.training.folders import (
    Progress,
    agreed_to_resume,
    go_on,
    read_progress,
    to_resume,
    verify_state,
)
from mindspeed_llm.training.lora import add_adapters
from mindspeed_llm.training.lora_plan import LoraPlan, check_same, plan_lora
from mindspeed_llm.training.model_shape import check_flags, find_shape, vocabulary
from mindspeed_llm.training.options import TrainOptions
from mindspeed_llm.training.world import (
    Layout,
    check_experts,
    join,
    plan_layout,
    seed_everything,
)

logger = logging.getLogger(__name__)


@dataclass
class Setup:
    """What does not depend on weights: the shape, the layout, Megatron's configuration."""

    options: TrainOptions
    shape: ModelShape
    config_folder: Path | None
    layout: Layout
    vocab_size: int
    config: Any
    lora: LoraPlan | None
    """The adapters to train, if not the weights."""
    save_dir_lock: SaveDirLock | None
    """The first rank's hold on --save."""


@dataclass
class Training:
    """The model of this rank and what trains it."""

    chunks: list[Any]
    wrapped: list[Any]
    optimizer: Any
    checkpoints: Checkpoints
    progress: Progress


def prepare(options: TrainOptions, *, is_training: bool = True) -> Setup:
    """Check the options against the model and the ranks, and meet the other ranks."""
    is_first = os.environ.get("RANK", "0") == "0"
    save_dir_lock = SaveDirLock(options.save) if options.save and is_first else None
    with release_on_error(save_dir_lock):
        resumed = to_resume(options, is_training=is_training)
        if resumed is not None:
            verify_state(resumed, options)
        shape, folder = find_shape(options) if resumed is None else _known_shape(options, resumed)
        lora = plan_lora(options, shape)
        if resumed is not None:
            check_same(lora, read_progress(resumed).lora)
        layout = plan_layout(options, shape)
        if is_training:
            check_experts(options, shape)
        vocab_size = vocabulary(options, shape)
        join(options, layout)
        config = model.make_config(options, shape, layout)
        return Setup(options, shape, folder, layout, vocab_size, config, lora, save_dir_lock)


def begin(setup: Setup, provider: Callable[..., Any]) -> Training:
    """Build the model, and fill it from --load or from the checkpoint to go on from."""
    options = setup.options
    seed_everything(options.seed)
    with model.accepted_by_megatron():
        chunks = model.build_chunks(provider, setup.layout)
    resumed = agreed_to_resume(options)
    if resumed is None and not options.from_scratch:
        from mindspeed_llm.checkpoint.loading import load_weights

        load_weights(
            chunks,
            options.load,
            shape=setup.shape,
            noop_layers=options.noop_layers,
            verify=not options.no_verify,
            is_shared=True,
        )
        logger.info("weights from %s", options.load)
    if setup.lora is not None:
        add_adapters(chunks, setup.lora, setup.shape, options)
    with model.accepted_by_megatron():
        wrapped = model.wrap(chunks, setup.config, options)
        optimizer = model.make_optimizer(wrapped, options)
    model.connect(setup.config, wrapped, optimizer, options)
    checkpoints = Checkpoints(options.save, chunks, optimizer)
    progress = Progress() if resumed is None else go_on(checkpoints, resumed, options)
    return Training(chunks, wrapped, optimizer, checkpoints, progress)


def _known_shape(options: TrainOptions, resumed: Path) -> tuple[ModelShape, Path | None]:
    """Return the shape that a training checkpoint notes, and the folder of its config.json."""
    shape = build(ModelShape, read_progress(resumed).shape, source=str(resumed))
    check_flags(options, shape)
    folder = resumed.parent / HF_FOLDER
    verify_small(folder, enabled=not options.no_verify)
    return shape, folder if (folder / "config.json").is_file() else None


def check_data(progress: Progress, fingerprint: str, options: TrainOptions) -> None:
    """Refuse to go on with other data than the run had."""
    if progress.data and progress.data != fingerprint:
        raise ConfigError(
            f"--save {options.save} holds a run on other data than --data-path "
            f"{' '.join(options.data_path)}: choose another --save, or load that checkpoint with "
            "--finetune"
        )
