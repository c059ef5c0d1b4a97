"""What is learnt from, and how it becomes batches."""

from mindspeed.config import Options


class DataOptions(Options):
    """The data and its batches."""

    data_path: tuple[str, ...] = ()
    """Prefixes of token files, as given to preprocess as --output-prefix; several with a weight in
    front of each: 0.3 one 0.7 two."""
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
    """Pad each micro-batch to its longest sample only (also --no-pad-to-seq-lengths)."""
    pad_to_multiple_of: int = 8
    """With --variable-seq-lengths: pad to a multiple of this."""
    neat_pack: bool = False
    """Rows hold several samples that must not see each other; found from the data as well."""
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
    """Folder of the model's tokenizer, kept with the checkpoints."""
