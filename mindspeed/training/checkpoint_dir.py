"""The directory of a run's checkpoints: how one is committed, and which one a run resumes from.

A checkpoint is written under a temporary name and renamed when all ranks are done. Only then the
tracker names it, so that at any time the tracker names a complete checkpoint.
"""

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from mindspeed.checkpoint.commit import atomic_write_text, fsync_tree
from mindspeed.checkpoint.detection import ADAPTER_CONFIG, TRACKER, detect
from mindspeed.checkpoint.digests import FileRecord, verify_small, write_digests
from mindspeed.config import ConfigError
from mindspeed.training import disk
from mindspeed.training.options import RunOptions

logger = logging.getLogger(__name__)

STATE_FILE = "training.json"
STAGING = ".incomplete-"
"""Part of the name of what is not, or no longer, a checkpoint."""
KINDS = {int: "a number of 0 or more", bool: "true or false", str: "a text", dict: "an object"}
SHARD = re.compile(r"__(\d+)_\d+\.distcp")
"""A file of one rank."""
MAX_DIGITS = 18
"""Digits of an iteration in a tracker; int() refuses thousands of them."""


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint stores beside tensors; seeds and learning rate follow from it."""

    iteration: int = 0
    consumed_samples: int = 0
    data: str = ""
    """Fingerprint of the data."""
    has_optimizer: bool = True
    shape: dict[str, Any] = field(default_factory=dict)
    """Sizes of the model."""
    lora: dict[str, Any] = field(default_factory=dict)
    """Configuration of the adapters in peft's format."""
    reference: str = ""
    """Fingerprint of frozen weights that the checkpoint does not hold."""
    nan_streak: int = 0
    """Consecutive steps, up to this one, whose loss was not finite."""
    tied: dict[str, Any] = field(default_factory=dict)
    """Other names of weights that the checkpoint holds once, each with its name there."""
    stage_name: str = ""
    """The stage of post-training that wrote it."""
    stage: dict[str, Any] = field(default_factory=dict)
    """What a stage keeps from one step to the next beside weights."""


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest training checkpoint of a directory, if it holds one."""
    tracker = Path(root) / TRACKER
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    is_number = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
    folder = Path(root) / f"iter_{int(text):07d}" if is_number else None
    return folder if folder is not None and (folder / STATE_FILE).is_file() else None


def read_state(folder: Path) -> TrainState:
    """Read and check the training state of a checkpoint."""
    path = folder / STATE_FILE
    try:
        state = TrainState(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    for name, default in asdict(TrainState()).items():
        value = getattr(state, name)
        if type(value) is not type(default) or (isinstance(value, int) and value < 0):
            found = json.dumps(value)[:40]
            raise ConfigError(f"{path}: {name} is {found}, not {KINDS[type(default)]}: is damaged")
    if folder.name.startswith("iter_") and folder.name != f"iter_{state.iteration:07d}":
        raise ConfigError(f"{path}: is of iteration {state.iteration}, not of the folder it is in")
    return state


def latest_finite(root: str | os.PathLike[str], iteration: int) -> Path | None:
    """Return the newest checkpoint up to an iteration that was not saved in a NaN streak."""
    for folder in sorted(Path(root).glob("iter_*"), reverse=True):
        number = folder.name.removeprefix("iter_")
        try:
            if int(number) <= iteration and not read_state(folder).nan_streak:
                return folder
        except (ConfigError, ValueError):  # damaged, or not of a training
            continue
    return None


def find_resume(options: RunOptions, *, is_training: bool = True) -> Path | None:
    """Return the checkpoint to resume from: that in --save, else --load if it is one.

    Without training, weights are enough: a checkpoint without training state is not an error.
    """
    load, save = options.load, options.save
    if save is not None and not options.no_auto_resume:
        if (found := latest_checkpoint(save)) is not None:
            return found
        if load is None or Path(load).resolve() != Path(save).resolve():
            _check_save_is_new(save)
        else:
            _check_state_not_lost(f"--load {load}", load)
    if load is None or options.finetune or options.from_scratch:
        return None
    if (Path(load) / STATE_FILE).is_file():  # one iteration was given
        return Path(load)
    if (found := latest_checkpoint(load)) is None and is_training:
        _check_state_not_lost(f"--load {load}", load)
    return found


def _check_save_is_new(root: str) -> None:
    """Raise if the tracker names a checkpoint that is missing: a new run would overwrite it."""
    tracker = Path(root) / TRACKER
    if not tracker.exists():
        return
    named = tracker.read_bytes()[:40].decode("utf-8", "replace").strip()
    if named != "release":  # converted weights, of no training
        _check_state_not_lost(f"--save {root}", root)
        raise ConfigError(
            f"--save {root}: {TRACKER} names {named!r}, and there is no training checkpoint of "
            "that name: correct it, choose another --save, or give --no-auto-resume to start from "
            "the beginning"
        )


def _check_state_not_lost(flag: str, root: str) -> None:
    """Raise for an iteration without the file that holds its training state."""
    try:
        found = detect(root)
    except ConfigError:
        return  # it is refused, with its reason, when its weights are read
    if found.kind == "torch_dist" and found.folder.name.startswith("iter_"):
        raise ConfigError(
            f"{flag}: {found.folder} has no {STATE_FILE}, so its training cannot be resumed: "
            "restore the file, or start a new run from its weights with --finetune, --load "
            f"{found.folder} and another --save"
        )


def verify_state(folder: Path, options: RunOptions) -> None:
    """Verify the training state of a checkpoint before anything is derived from it."""
    try:
        verify_small(folder, enabled=not options.no_verify)
    except ConfigError as error:
        raise ConfigError(f"{error}{_advice(folder)}") from None


def agree_on_resume(options: RunOptions) -> Path | None:
    """Return what the first rank resumes from: it holds --save and sees no other run's work."""
    choice = [find_resume(options)]
    torch.distributed.broadcast_object_list(choice)
    return choice[0]


class Mismatch(ConfigError):
    """A checkpoint is complete, but not of this run's model: an older one would be no better."""


class CheckpointLoader(Protocol):
    """Reads this rank's part of a training checkpoint."""

    def load(self, folder: Path, *, with_optimizer: bool, verify: bool = True) -> None:
        """Fill the model and, if wanted, its optimizer."""


def resume(checkpoints: CheckpointLoader, folder: Path, options: RunOptions) -> TrainState:
    """Load a training checkpoint and return its training state."""
    state = read_state(folder)
    with_optimizer = state.has_optimizer and not options.no_load_optim
    try:
        checkpoints.load(folder, with_optimizer=with_optimizer, verify=not options.no_verify)
    except Mismatch:
        raise
    except ConfigError as error:
        raise ConfigError(f"{error}{_advice(folder)}") from None
    logger.info("resuming after iteration %d (%s)", state.iteration, folder)
    if not with_optimizer:
        unsaved = "it was not saved (--no-save-optim)"
        why = "--no-load-optim" if state.has_optimizer else unsaved
        logger.warning("the optimizer state is reset: %s", why)
    return state


def _advice(damaged: Path) -> str:
    """Return how to resume from the checkpoint before one that cannot be loaded."""
    older = latest_finite(damaged.parent, int(damaged.name.removeprefix("iter_")) - 1)
    if older is None:
        return ""
    last = int(older.name.removeprefix("iter_"))
    return f"; to resume from iteration {last}, put {last} into {damaged.parent / TRACKER}"


class CheckpointStore:
    """Commits the checkpoints of one run; every rank takes part in `create` and `commit`."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def create(self, iteration: int) -> Path:
        """Return an empty staging directory that no other process, even a stale one, writes to."""
        name = [f".iter_{iteration:07d}{STAGING}{secrets.token_hex(4)}"]
        if torch.distributed.get_rank() == 0:
            self._remove_incomplete()
            (self._root / name[0]).mkdir(parents=True)
        torch.distributed.broadcast_object_list(name)
        return self._root / name[0]

    def commit(
        self,
        staging: Path,
        state: TrainState,
        keep_last: int | None,
        written: Mapping[str, FileRecord],
        **parallel_sizes: int,
    ) -> None:
        """Rename a checkpoint once all ranks have written; then make it the newest.

        `written` are the digests of what all ranks have written, which the first rank has.
        """
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            final = self._root / f"iter_{state.iteration:07d}"
            atomic_write_text(staging / STATE_FILE, json.dumps(asdict(state)) + "\n")
            if state.lora:
                config = json.dumps(state.lora, indent=2) + "\n"
                atomic_write_text(staging / ADAPTER_CONFIG, config)
            _write_digests(staging, state.iteration, written, parallel_sizes)
            fsync_tree(staging)
            self._rename(staging, final)
            atomic_write_text(self._root / TRACKER, f"{state.iteration}\n")
            logger.info("saved iteration %d in %s", state.iteration, final)
            if keep_last is not None:
                self._remove_older(final, keep_last)
        torch.distributed.barrier()

    @contextmanager
    def explain_errors(self, iteration: int, *more: type[Exception]) -> Iterator[None]:
        """Raise ConfigError if a checkpoint cannot be written, and remove the incomplete one."""
        from torch.distributed.checkpoint import CheckpointException

        kinds: tuple[type[BaseException], ...] = (OSError, RuntimeError, CheckpointException)
        try:
            yield
        except (*kinds, *more) as error:
            if isinstance(error, RuntimeError) and not disk.is_write_error(error):
                raise
            why = disk.explain(reason(error), self._root, latest_checkpoint(self._root))
            if torch.distributed.get_rank() == 0:
                self._remove_incomplete()
            raise ConfigError(
                f"--save {self._root}: iteration {iteration} could not be saved ({why}); what "
                "was saved before is intact: correct this and give the same command again"
            ) from None

    def _remove_incomplete(self) -> None:
        for stale in self._root.glob(f".iter_*{STAGING}*"):
            shutil.rmtree(stale, ignore_errors=True)

    def _rename(self, staging: Path, final: Path) -> None:
        old = final.with_name(f".{final.name}{STAGING}replaced")
        if final.exists():  # of a run that starts again, or one that was killed before the tracker
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(staging, final)
        shutil.rmtree(old, ignore_errors=True)

    def _remove_older(self, newest: Path, keep_last: int) -> None:
        """Remove older checkpoints; each loses its name before its files."""
        older = sorted(path for path in self._root.glob("iter_*") if path.name <= newest.name)
        for path in older[:-keep_last]:
            gone = path.with_name(f".{path.name}{STAGING}forgotten")
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)


def _write_digests(
    folder: Path,
    iteration: int,
    written: Mapping[str, FileRecord],
    parallel_sizes: Mapping[str, int],
) -> None:
    ranks = {name: {"rank": int(found[1])} for name in written if (found := SHARD.match(name))}
    world = torch.distributed.get_world_size()
    about = {
        "kind": "training",
        "iteration": iteration,
        "layout": {"world": world, **parallel_sizes},
    }
    write_digests(folder, written, about, ranks)


def load_error(folder: Path, error: BaseException) -> ConfigError:
    """Return the error of a checkpoint that cannot be loaded, with the file where it is known."""
    why = reason(error)
    is_named = why.startswith(str(folder))
    return ConfigError(why if is_named else f"{folder}: cannot be loaded ({why})")


def reason(error: BaseException) -> str:
    """Return the message of the disk's error inside the exceptions that wrap it."""
    failures = getattr(error, "failures", None) or {}
    first = next((pair[0] for pair in failures.values()), error)
    text = getattr(first, "strerror", None) or str(first) or type(first).__name__
    if hasattr(error, "failures") and not failures:
        return "the first rank reports why"
    return str(text).strip().splitlines()[-1]
