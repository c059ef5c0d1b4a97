"""The shape of the model to train."""

from pathlib import Path
from typing import Any

from mindspeed.checkpoint.detection import CheckpointDir, detect
from mindspeed.checkpoint.digests import verify_small
from mindspeed.config import ConfigError, Spelling
from mindspeed.distributed.parallel_dims import padded_vocabulary
from mindspeed_llm.models.config import ModelConfig, RotaryConfig
from mindspeed_llm.models.registry import read_model_config
from mindspeed_llm.training.architecture_options import check_architecture, given_architecture
from mindspeed_llm.training.options import TrainOptions

NEEDED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
"""Flags that are needed where there is no config.json."""


def find_shape(options: TrainOptions) -> tuple[ModelConfig, Path | None]:
    """Return the shape and the folder of the config.json it was read from, if from one."""
    found = None if options.load is None or options.from_scratch else _detect(options.load)
    folder = _config_folder(options, found)
    for source in (found.folder if found else None, folder):
        verify_small(source, enabled=not options.no_verify)
    if folder is None:
        shape = _from_flags(options)
    elif found is None:
        shape = read_model_config(folder, named=options.model_type_hf, from_scratch=True)
    else:
        shape = _of_weights(found, folder, options)
    check_architecture(options, shape)
    return shape, folder


def _detect(load: str) -> CheckpointDir:
    try:
        return detect(load)
    except ConfigError as error:
        has_config = (Path(load) / "config.json").is_file()
        advice = "; --from-scratch trains random weights" if has_config else ""
        raise ConfigError(f"--load {error}{advice}") from None


def _of_weights(found: CheckpointDir, folder: Path, options: TrainOptions) -> ModelConfig:
    """Read the config, and from the weights what it leaves open, such as biases."""
    from mindspeed_llm.checkpoint.loading import open_source

    source = open_source(
        found, folder, named=options.model_type_hf, noop_layers=options.noop_layers
    )
    return source.config


def _config_folder(options: TrainOptions, found: CheckpointDir | None) -> Path | None:
    if options.hf_cfg_dir is not None:
        return Path(options.hf_cfg_dir)
    paths = [found.config_folder if found else None, options.load, options.tokenizer_name_or_path]
    for path in paths:
        if path is not None and (Path(path) / "config.json").is_file():
            return Path(path)
    if options.from_scratch:
        return None
    raise ConfigError(f"--load {options.load}: has no config.json: give --hf-cfg-dir")


def _from_flags(options: TrainOptions) -> ModelConfig:
    missing = [Spelling.FLAG.name_of(name) for name in NEEDED if getattr(options, name) is None]
    if missing:
        raise ConfigError(f"there is no config.json: give --hf-cfg-dir, or {', '.join(missing)}")
    if options.num_experts:
        raise ConfigError(
            f"--num-experts {options.num_experts}: there is no config.json, which says what a "
            "mixture of experts is like: give --hf-cfg-dir"
        )
    for name in given_architecture(options):
        flag = Spelling.FLAG.name_of(options.name_given(name))
        raise ConfigError(f"{flag}: such models have a config.json: give --hf-cfg-dir")
    sizes: Any = options  # what is needed is given
    heads = sizes.num_attention_heads
    return ModelConfig(
        family=options.model_type_hf or "llama",
        num_layers=sizes.num_layers - len(options.noop_layers),
        hidden_size=sizes.hidden_size,
        ffn_hidden_size=sizes.ffn_hidden_size,
        num_attention_heads=heads,
        num_query_groups=sizes.num_query_groups or heads,
        kv_channels=sizes.kv_channels or sizes.hidden_size // heads,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=options.max_position_embeddings or options.seq_length or 4096,
        norm_epsilon=options.norm_epsilon or 1e-6,
        tied=not options.untie_embeddings_and_output_weights,
        qkv_bias=options.add_qkv_bias,
        qk_layernorm=options.qk_layernorm,
        rotary=RotaryConfig(base=options.rotary_base or 10000.0),
    )


def vocabulary(options: TrainOptions, shape: ModelConfig) -> int:
    """Return the rows of the embedding with padding."""
    tp = options.tensor_model_parallel_size
    if options.padded_vocab_size is None:
        return padded_vocabulary(shape.vocab_size, options.make_vocab_size_divisible_by, tp)
    if options.padded_vocab_size < shape.vocab_size or options.padded_vocab_size % tp:
        raise ConfigError(
            f"--padded-vocab-size {options.padded_vocab_size}: must be at least the model's "
            f"{shape.vocab_size} and a multiple of --tensor-model-parallel-size {tp}"
        )
    return options.padded_vocab_size
