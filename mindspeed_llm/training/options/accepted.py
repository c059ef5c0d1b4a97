"""Flags of existing scripts that are understood but change nothing here, each with the reason."""

from typing import Literal

from mindspeed.config import Options


class AcceptedOptions(Options):
    """Accepted without effect."""

    use_mcore_models: bool = False
    """Accepted for existing scripts: there are no others."""
    is_instruction_dataset: bool = False
    """Accepted for existing scripts: the stage says what the data is."""
    tokenizer_type: Literal["PretrainedFromHF"] = "PretrainedFromHF"
    """Accepted for existing scripts: Hugging Face's tokenizers are the ones there are."""
    tokenizer_not_use_fast: bool = False
    """Accepted for existing scripts: fast and slow tokenizers give the same ids."""
    no_masked_softmax_fusion: bool = False
    """Accepted for existing scripts: there is no such kernel to switch off."""
    no_load_rng: bool = False
    """Accepted for existing scripts: random numbers depend on seed, step and rank only."""
    no_save_rng: bool = False
    """Accepted for existing scripts: random numbers depend on seed, step and rank only."""
    distributed_backend: str | None = None
    """Accepted for existing scripts: the device decides."""
    exit_on_missing_checkpoint: bool = False
    """Accepted for existing scripts: a missing checkpoint is always an error."""
    ckpt_format: Literal["torch_dist", "torch"] = "torch_dist"
    """Accepted for existing scripts: checkpoints are torch_dist, which every layout can load."""
    num_workers: int = 0
    """Accepted for existing scripts: samples are read in place."""
    no_shared_storage: bool = False
    """Accepted for existing scripts: no index files are written."""
    local_rank: int | None = None
    """Accepted for existing launchers: the environment tells."""
