"""Training checkpoints: weights and optimizer in torch_dist, which any layout can load.

A checkpoint is written under another name and renamed when all ranks are done; only then the
tracker names it. So whatever happens, the tracker names a whole checkpoint.
"""

import inspect
import json
import logging
import os
import pickle
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.commit import flush_tree, write_file
from mindspeed_llm.checkpoint.dcp_metadata import read_metadata
from mindspeed_llm.checkpoint.detection import TRACKER

logger = logging.getLogger(__name__)

STATE_FILE = "training.json"
ASIDE = ".incomplete"


@dataclass(frozen=True)
class Progress:
    """Where a run is; random numbers and the learning rate follow from it."""

    iteration: int = 0
    consumed_samples: int = 0
    data: str = ""
    """Fingerprint of the data."""
    has_optimizer: bool = True
    shape: dict[str, Any] = field(default_factory=dict)
    """The model, as ModelShape holds it."""


def newest(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest training checkpoint of a folder, if it holds one."""
    tracker = Path(root) / TRACKER
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = Path(root) / f"iter_{int(text):07d}" if text.isdigit() else None
    return folder if folder is not None and (folder / STATE_FILE).is_file() else None


def read_progress(folder: Path) -> Progress:
    """Return where the run that saved a checkpoint was."""
    try:
        return Progress(**json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder / STATE_FILE}: cannot be read ({error})") from None


class Checkpoints:
    """Saves and loads the training of one model."""

    def __init__(self, root: str | None, chunks: list[Any], optimizer: Any) -> None:
        self._root = Path(root) if root else None
        self._chunks, self._optimizer = chunks, optimizer

    def load(self, folder: Path, *, with_optimizer: bool) -> None:
        """Read this rank's part of a training checkpoint of any layout."""
        from megatron.core import dist_checkpointing

        _refuse_code(folder)
        state = dist_checkpointing.load(
            self._state(with_optimizer, is_loading=True),
            str(folder),
            validate_access_integrity=False,
        )
        for name, chunk in self._named():
            chunk.load_state_dict(state[name])
        if with_optimizer:
            self._optimizer.load_state_dict(state["optimizer"])
        else:
            self._optimizer.reload_model_params()

    def save(self, progress: Progress, *, keep_last: int | None = None) -> Path | None:
        """Save where the run is; return the folder, or nothing where there is no place."""
        from megatron.core import dist_checkpointing

        if self._root is None:
            return None
        final = self._root / f"iter_{progress.iteration:07d}"
        aside = self._root / f".{final.name}{ASIDE}"
        is_first = torch.distributed.get_rank() == 0
        if is_first:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        torch.distributed.barrier()
        state = self._state(progress.has_optimizer, is_loading=False)
        dist_checkpointing.save(state, str(aside), ("torch_dist", 1))
        torch.distributed.barrier()
        if is_first:
            _drop_plans(aside)
            write_file(aside / STATE_FILE, json.dumps(asdict(progress)) + "\n")
            self._commit(aside, final, progress.iteration)
            if keep_last is not None:
                self._forget(final, keep_last)
        torch.distributed.barrier()
        return final

    def _commit(self, aside: Path, final: Path, iteration: int) -> None:
        assert self._root is not None
        flush_tree(aside)
        if final.exists():  # of a run that begins anew, or one that was killed before the tracker
            old = self._root / f".{final.name}.replaced"
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
            os.rename(aside, final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(aside, final)
        write_file(self._root / TRACKER, f"{iteration}\n")

    def _forget(self, newest: Path, keep_last: int) -> None:
        """Remove older checkpoints; each loses its name before its files."""
        assert self._root is not None
        older = sorted(path for path in self._root.glob("iter_*") if path.name <= newest.name)
        for path in older[:-keep_last]:
            gone = path.with_name(f".{path.name}{ASIDE}")
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _named(self) -> list[tuple[str, Any]]:
        if len(self._chunks) == 1:
            return [("model", self._chunks[0])]
        return [(f"model{number}", chunk) for number, chunk in enumerate(self._chunks)]

    def _state(self, with_optimizer: bool, *, is_loading: bool) -> dict[str, Any]:
        from megatron.core.optimizer import MegatronOptimizer

        state: dict[str, Any] = {name: chunk.sharded_state_dict() for name, chunk in self._named()}
        if with_optimizer:
            # Newer releases have to be asked for optimizer state that another layout can read.
            known = inspect.signature(MegatronOptimizer.sharded_state_dict).parameters
            form = {"distrib_optim_sharding_type": "fully_reshardable"}
            wish = {"metadata": form} if "metadata" in known else {}
            state["optimizer"] = self._optimizer.sharded_state_dict(state, is_loading, **wish)
        return state


def _drop_plans(folder: Path) -> None:
    """Take out of .metadata what only a second save by the same process could use.

    The plans of all ranks are larger than all the rest, and of classes that a reader which trusts
    nobody does not know.
    """
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # written by this process a moment ago
    if vars(metadata).pop("all_local_plans", None) is not None:
        path.write_bytes(pickle.dumps(metadata))


def _refuse_code(folder: Path) -> None:
    """Read the pickles of a checkpoint safely first: Megatron and torch run what is in them."""
    read_metadata(folder)
    common = folder / "common.pt"
    try:
        torch.load(common, weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{common}: cannot be loaded safely ({reason})") from None
