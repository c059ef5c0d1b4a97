"""Options of a conversion."""

from typing import Literal

from pydantic import ConfigDict

from mindspeed.config import Options


class ConvertOptions(Options):
    """Where the weights come from and where they go; what --load-dir holds says which way."""

    model_config = ConfigDict(protected_namespaces=())  # pydantic keeps "model_" for itself

    load_dir: str = ""
    """Hugging Face folder, or a DCP checkpoint: its root, its `release` or one `iter_...`."""
    save_dir: str = ""
    """Where to write: a DCP goes to its folder `release`, with a tracker beside."""
    model_assets_dir: str | None = None
    """Hugging Face folder the training began with: config, processor, and the names and files the
    weights had. Without it, the `hf` folder that a conversion to DCP leaves."""
    model_id: str | None = None
    """A class of ModelHub; without it the class that config.json names."""
    trust_remote_code: bool = False
    """Run the Python files of the Hugging Face folder."""
    params_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Type of the weights that are written; without it they keep the type they have."""
    lora_alpha: int | None = None
    """alpha of the adapters in a DCP, which are added to the weights; without it as the checkpoint
    of the training says."""
    no_verify: bool = False
    """Do not compare what is read with the digests that were written beside it."""
    check_finite: bool = False
    """Refuse weights that hold NaN or infinity."""
    overwrite: bool = False
    """Replace what --save-dir already holds."""
