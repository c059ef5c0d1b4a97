"""Convert a GGUF file to an HF directory that can be trained: weights, config and tokenizer."""

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed.checkpoint.commit import staged_directory
from mindspeed.checkpoint.digests import write_digests
from mindspeed.config import ConfigError

MAGIC = b"GGUF"


def import_gguf(file: Path, folder: Path, dtype: str = "fp32", overwrite: bool = False) -> None:
    """Write the model in `file` as an HF directory; quantized weights are dequantized."""
    import transformers

    _check(file)
    with staged_directory(folder, overwrite) as staging:
        import_weights(file, staging, dtype)
        _read(transformers.AutoTokenizer, file).save_pretrained(staging)
        write_digests(staging, {}, {"kind": "converted"})


def import_weights(file: Path, folder: Path, dtype: str = "fp32") -> None:
    """Write the config and the weights only: reading the tokenizer takes much longer."""
    import transformers

    from mindspeed.checkpoint.output import DTYPES

    model = _read(transformers.AutoModelForCausalLM, file, dtype=DTYPES[dtype])
    # transformers refuses to save what came out of a GGUF file, so its parts are saved.
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    type(model.config)(**_shortest_floats(config)).save_pretrained(folder)
    _save_weights(model, folder / "model.safetensors")


def _shortest_floats(value: Any) -> Any:
    """Return 1e-05 for 9.999999747378752e-06, as which float32 in a GGUF file stores it."""
    if isinstance(value, dict):
        return {key: _shortest_floats(entry) for key, entry in value.items()}
    if isinstance(value, float) and np.float32(value) == value:
        return float(str(np.float32(value)))
    return value


def _check(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            start = opened.read(len(MAGIC))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    if start != MAGIC:
        raise ConfigError(f"{file}: is not a GGUF file: it begins with {start!r}, not {MAGIC!r}")


def _read(auto_class: Any, file: Path, **options: Any) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    logging.getLogger("gguf").setLevel(logging.ERROR)
    try:
        return auto_class.from_pretrained(file.parent, gguf_file=file.name, **options)
    except Exception as error:  # whatever a damaged file can cause in transformers and gguf
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{file}: transformers cannot read it: {reason}") from None


def _save_weights(model: Any, path: Path) -> None:
    from safetensors.torch import save_file

    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})
