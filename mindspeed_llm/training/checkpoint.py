"""Training checkpoints: weights and optimizer in torch_dist, which any layout can load.

A checkpoint is written under another name and renamed when all ranks are done; only then the
tracker names it. So whatever happens, the tracker names a whole checkpoint.
"""

import inspect
import json
import logging
import os
import pickle
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.adapters import CONFIG
from mindspeed_llm.checkpoint.commit import flush_tree, write_file
from mindspeed_llm.checkpoint.dcp_metadata import read_metadata
from mindspeed_llm.checkpoint.detection import TRACKER

logger = logging.getLogger(__name__)

STATE_FILE = "training.json"
ASIDE = ".incomplete-"


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
    lora: dict[str, Any] = field(default_factory=dict)
    """The adapters, as peft's configuration tells of them."""


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
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._root = Path(root) if root else None
        self._chunks, self._optimizer = chunks, optimizer
        self._calls = AsyncCallsQueue()
        self._saving: int | None = None
        """The iteration that is being saved in the background."""

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

    def save(
        self, progress: Progress, *, keep_last: int | None = None, in_background: bool = False
    ) -> None:
        """Save where the run is, if there is a place for it.

        In the background, what is to be written is copied now, and training may go on; `poll` and
        `finish` see to the end of it.
        """
        from megatron.core import dist_checkpointing

        if self._root is None:
            return
        self.finish()
        with self._explained(progress.iteration):
            aside = self._new_folder(progress.iteration)
            state = self._state(progress.has_optimizer, is_loading=False)
            request = dist_checkpointing.save(
                state, str(aside), ("torch_dist", 1), async_sharded_save=in_background
            )
            commit = partial(self._commit, aside, progress, keep_last)
            if request is None:
                commit()
            else:
                request.add_finalize_fn(commit)
                self._saving = progress.iteration
                self._calls.schedule_async_request(request)

    def poll(self) -> None:
        """Complete a save in the background if all ranks have written."""
        if self._saving is not None:
            self._finalize(wait=False)

    def finish(self) -> None:
        """Wait for a save in the background and complete it."""
        if self._saving is not None:
            self._finalize(wait=True)

    def _finalize(self, *, wait: bool) -> None:
        assert self._saving is not None
        with self._explained(self._saving):
            self._calls.maybe_finalize_async_calls(blocking=wait)
        if not self._calls.get_num_unfinalized_calls():
            self._saving = None

    def _new_folder(self, iteration: int) -> Path:
        """Return an empty folder that no other process, even one left over, writes in."""
        assert self._root is not None
        name = [f".iter_{iteration:07d}{ASIDE}{secrets.token_hex(4)}"]
        if torch.distributed.get_rank() == 0:
            for left_over in self._root.glob(f".iter_*{ASIDE}*"):
                shutil.rmtree(left_over, ignore_errors=True)
            (self._root / name[0]).mkdir(parents=True)
        torch.distributed.broadcast_object_list(name)
        return self._root / name[0]

    def _commit(self, aside: Path, progress: Progress, keep_last: int | None) -> None:
        """Give a checkpoint its name once all ranks have written; then name it the newest."""
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            assert self._root is not None
            final = self._root / f"iter_{progress.iteration:07d}"
            _drop_plans(aside)
            write_file(aside / STATE_FILE, json.dumps(asdict(progress)) + "\n")
            if progress.lora:
                write_file(aside / CONFIG, json.dumps(progress.lora, indent=2) + "\n")
            flush_tree(aside)
            self._rename(aside, final)
            write_file(self._root / TRACKER, f"{progress.iteration}\n")
            logger.info("saved iteration %d in %s", progress.iteration, final)
            if keep_last is not None:
                self._forget(final, keep_last)
        torch.distributed.barrier()

    def _rename(self, aside: Path, final: Path) -> None:
        old = final.with_name(f".{final.name}{ASIDE}replaced")
        if final.exists():  # of a run that begins anew, or one that was killed before the tracker
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(aside, final)
        shutil.rmtree(old, ignore_errors=True)

    def _forget(self, newest: Path, keep_last: int) -> None:
        """Remove older checkpoints; each loses its name before its files."""
        assert self._root is not None
        older = sorted(path for path in self._root.glob("iter_*") if path.name <= newest.name)
        for path in older[:-keep_last]:
            gone = path.with_name(f".{path.name}{ASIDE}forgotten")
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)

    @contextmanager
    def _explained(self, iteration: int) -> Iterator[None]:
        """Tell in one line why a checkpoint could not be written."""
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from torch.distributed.checkpoint import CheckpointException

        try:
            yield
        except (OSError, CheckpointException, CheckpointingException) as error:
            reason = _reason(error)
            raise ConfigError(
                f"--save {self._root}: iteration {iteration} could not be saved ({reason}); what "
                "was saved before is whole: put this right and give the same command again"
            ) from None

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


def _reason(error: BaseException) -> str:
    """Find the error of the disk in what wraps it."""
    failures = getattr(error, "failures", None) or {}
    first = next((pair[0] for pair in failures.values()), error)
    text = getattr(first, "strerror", None) or str(first) or type(first).__name__
    return str(text).strip().splitlines()[-1]


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
