"""What is trained on, and how it becomes batches."""

from typing import Any

from pydantic import create_model

from mindspeed.config import Options
from mindspeed_llm.data.options import PreprocessOptions


class DataOptions(Options):
    """The data and its batches."""

    data_path: tuple[str, ...] = ()
    """Prefixes of token files, as given to preprocess as --output-prefix, or data files, which are
    preprocessed once; several with a weight in front of each: 0.3 one 0.7 two."""
    split: str = "100,0,0"
    """Shares of the data for training, validation and test."""
    seq_length: int | None = None
    """Longest sample, in tokens (default: the longest there is); pretraining cuts documents to
    it."""
    micro_batch_size: int = 1
    """Samples in one pass."""
    global_batch_size: int | None = None
    """Samples in one step over all ranks (default: one micro-batch a rank)."""
    variable_seq_lengths: bool = False
    """Samples of a micro-batch follow each other without padding, and do not see each other; with
    --transformer-impl local they are padded to the longest (also --no-pad-to-seq-lengths)."""
    pad_to_multiple_of: int = 16
    """With --variable-seq-lengths: pad the tokens of a micro-batch to a multiple of this."""
    neat_pack: bool = False
    """Rows hold several samples that must not see each other; found from the data as well. Data
    files are packed so with --pack."""
    reset_position_ids: bool = False
    """Old name of what --neat-pack says."""
    reset_attention_mask: bool = False
    """New name of what --neat-pack says."""
    calculate_per_token_loss: bool = False
    """Mean loss over all tokens of a step; without it the mean over micro-batches of the mean over
    their tokens, so that short samples weigh more."""
    no_shuffle: bool = False
    """Read samples in the order of the files."""
    padded_samples: bool = False
    """Fill every epoch up to a multiple of the global batch, with its first samples."""
    tokenizer_name_or_path: str | None = None
    """Folder of the model's tokenizer, for data files (default: that of the model)."""


RAW_FIELDS = ("json_keys", "map_keys", "prompt_type", "prompt_type_path", "enable_thinking")
RAW_FIELDS += ("special_tokens", "too_long", "pack", "append_eod", "on_bad_line", "workers")
RAW_FIELDS += ("n_subs", "cache_dir", "trust_remote_code")


class HandlerOptions(Options):
    """How data files are preprocessed; token files are used as they are."""

    handler_name: str | None = None
    """What the records are (default: AlpacaStyleInstructionHandler, for pretraining
    GeneralPretrainHandler)."""


def _as_preprocess_has_them() -> dict[str, Any]:
    fields = PreprocessOptions.model_fields
    return {name: (fields[name].annotation, fields[name]) for name in RAW_FIELDS}


RawOptions = create_model("RawOptions", __base__=HandlerOptions, **_as_preprocess_has_them())
RawOptions.__doc__ = HandlerOptions.__doc__
