"""Load the model of this rank for inference: no optimizer, no gradients."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from mindspeed import device
from mindspeed.checkpoint.detection import detect
from mindspeed.compat import megatron
from mindspeed.config import ConfigError
from mindspeed.distributed import environment
from mindspeed.distributed.seeds import seed_everything
from mindspeed_llm.checkpoint.loading import load_weights
from mindspeed_llm.models.config import ModelConfig, language_model
from mindspeed_llm.models.megatron import gpt_model
from mindspeed_llm.models.registry import read_model_config
from mindspeed_llm.training.model import build_chunks, unrounded_routers
from mindspeed_llm.training.options import TrainOptions
from mindspeed_llm.training.setup import Setup, prepare


@dataclass(frozen=True)
class LoadedModel:
    """This rank's part of a model with its weights."""

    chunks: tuple[Any, ...]
    """One of Megatron's GPTModels for every virtual pipeline stage."""
    config: ModelConfig
    max_length: int
    """Tokens of the longest sequence it supports."""
    config_folder: Path | None
    """The folder with config.json and, usually, the tokenizer."""

    @property
    def is_last(self) -> bool:
        """Return whether this rank has the last pipeline stage."""
        return bool(self.chunks[-1].post_process)


def find_language_model(load: str | None, family: str | None) -> Path | None:
    """Return the folder with config.json of --load, if any; raise if it is no language model."""
    assert load is not None  # checked with the options
    folder = detect(load).config_folder
    if folder is not None:
        language_model(read_model_config(folder, named=family), load)
    return folder


def load_model(options: TrainOptions) -> LoadedModel:
    """Initialize the process groups, build this rank's part of the model and load --load."""
    # After the adaptor: it imports Megatron.
    from mindspeed_llm.generation.inference import prepare_decoding

    if options.load is None:
        raise ConfigError("--load is missing: give a model or a checkpoint")
    _check_ranks(options)
    setup = prepare(_accepted_by_first_release(options), is_training=False)
    setup.config.sequence_parallel = False
    language_model(setup.shape, options.load)  # --hf-cfg-dir may name another model's config
    seed_everything(options.seed)  # some layers fork a random generator even in inference
    setup.config.perform_initialization = False  # random weights would be overwritten at once
    # Not even built: nothing asks for more than the next token.
    setup.config.mtp_num_layers = None
    shape = setup.shape.model_copy(update={"mtp_num_layers": 0})
    (module,) = build_chunks(_provider(setup, shape), setup.dims)
    with unrounded_routers([module]):
        module = module.to(setup.config.params_dtype).eval().requires_grad_(False)
    load_weights(
        [module],
        options.load,
        config=setup.shape,
        noop_layers=options.noop_layers,
        verify=not options.no_verify,
        is_shared=True,
    )
    prepare_decoding(module)
    max_length = options.max_position_embeddings or setup.shape.max_position_embeddings
    return LoadedModel((module,), shape, max_length, setup.config_folder)


def _check_ranks(options: TrainOptions) -> None:
    """Refuse ranks that are no whole copies of the model; sets of experts are checked later."""
    tp, pp = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    world = environment.world_size()
    if world % (tp * pp):
        raise ConfigError(
            f"{world} rank(s) cannot share --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp}: start {tp * pp}, or a multiple of it for copies "
            "of the model that share the prompts"
        )


def _accepted_by_first_release(options: TrainOptions) -> TrainOptions:
    """Ask for a shared sequence, where 0.12 makes no configuration of experts and TP without one.

    The model is built without; the check is for trainings.
    """
    tp, ep = options.tensor_model_parallel_size, options.expert_model_parallel_size
    is_needed = megatron.version() < Version("0.16") and tp > 1 and ep > 1
    return options.model_copy(update={"sequence_parallel": is_needed})


def _provider(setup: Setup, shape: ModelConfig) -> Any:
    def build(
        pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> Any:
        return gpt_model(
            shape,
            setup.config,
            impl=setup.options.transformer_impl,
            vocab_size=setup.vocab_size,
            max_sequence_length=setup.options.max_position_embeddings,
            vp_stage=vp_stage,
            pre_process=pre_process,
            post_process=post_process,
        )

    return build


def to_device(values: Any) -> torch.Tensor:
    """Return an int64 tensor on this rank's device."""
    return torch.as_tensor(values, dtype=torch.int64, device=device.current().torch_device)
