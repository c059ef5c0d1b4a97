"""Detect the kind of a checkpoint directory, and read the description of its adapters."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindspeed.config import ConfigError, parse_json

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin")
TRACKER = "latest_checkpointed_iteration.txt"
HF_FOLDER = "hf"
"""The folder of a converted checkpoint that keeps the config and tokenizer it came from."""
RANK_FILE = "model_optim_rng.pt"
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class CheckpointDir:
    """A directory with weights."""

    kind: Literal["hf", "mcore", "torch_dist"]
    folder: Path
    """The directory with the weights: the given one or its newest iteration."""
    root: Path
    """The directory that was given, or the one above an iteration that was given."""

    @property
    def config_folder(self) -> Path | None:
        """Return the folder with the HF config.json of the weights, None if there is none."""
        for folder in (self.folder, self.root / HF_FOLDER, self.root):
            if (folder / "config.json").is_file():
                return folder
        return None


def detect(path: str | os.PathLike[str]) -> CheckpointDir:
    """Return what kind of checkpoint a directory is; raise if it has no weights."""
    root = check_directory(path)
    if (root / TRACKER).is_file():
        folder = _newest(root)
        return _megatron(folder, root) or _nothing(folder)
    if (found := _megatron(root, root.parent)) is not None:
        return found
    if any((root / name).is_file() for name in (*INDEXES, *SINGLES)) or any(
        root.glob("*.safetensors")
    ):
        return CheckpointDir("hf", root, root)
    raise ConfigError(
        f"{root}: holds no weights: looked for {TRACKER} (a Megatron checkpoint), "
        f"mp_rank_*/{RANK_FILE} or .metadata (one iteration of it), and "
        f"{SINGLES[0]} or {INDEXES[0]} (an HF model)"
    )


def check_directory(path: str | os.PathLike[str], flag: str = "") -> Path:
    """Raise if the directory of a model or checkpoint, given by a flag, does not exist."""
    root = Path(path)
    if not root.is_dir():
        what = "is a file, not a directory" if root.exists() else "does not exist"
        given = f"{flag} {root}".lstrip()
        raise ConfigError(f"{given}: {what}: give the directory of a model or checkpoint")
    return root


def _megatron(folder: Path, root: Path) -> CheckpointDir | None:
    if (folder / ".metadata").is_file():
        return CheckpointDir("torch_dist", folder, root)
    if any(folder.glob(f"mp_rank_*/{RANK_FILE}")):
        return CheckpointDir("mcore", folder, root)
    return None


def _newest(root: Path) -> Path:
    """Return the folder that the tracker names."""
    try:
        text = (root / TRACKER).read_text(encoding="utf-8")[:64].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{root / TRACKER}: cannot be read ({error})") from None
    if text != "release" and not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{root / TRACKER}: says {text!r}: it must be a number or release")
    folder = root / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise ConfigError(f"{root / TRACKER}: says {text}, but there is no {folder.name}")
    return folder


def _nothing(folder: Path) -> CheckpointDir:
    raise ConfigError(f"{folder}: holds no weights: looked for mp_rank_*/{RANK_FILE} and .metadata")


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read the description of the LoRA adapters in a checkpoint or a folder of peft."""
    try:
        config = parse_json((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        float(config["lora_alpha"]) / int(config["r"])
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise ConfigError(f"{folder / ADAPTER_CONFIG}: cannot be read ({error})") from None
    return dict(config)
