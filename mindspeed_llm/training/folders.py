"""Folders of training checkpoints: written under another name, renamed when all ranks are done.

Only then the tracker names the new one. So whatever happens, the tracker names a whole checkpoint.
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
ASIDE = ".incomplete-"
KINDS = {int: "a number of 0 or more", bool: "true or false", str: "a text", dict: "an object"}
SHARD = re.compile(r"__(\d+)_\d+\.distcp")
"""What a rank has written."""
LONGEST_NUMBER = 18
"""Digits of an iteration in a tracker; int() refuses thousands of them."""


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
    nan_streak: int = 0
    """Steps in a row, up to this one, whose loss was not a number."""
    tied: dict[str, Any] = field(default_factory=dict)
    """Other names of weights that the checkpoint holds once, each with the name it has there."""


def newest(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest training checkpoint of a folder, if it holds one."""
    tracker = Path(root) / TRACKER
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    is_number = text.isascii() and text.isdigit() and len(text) <= LONGEST_NUMBER
    folder = Path(root) / f"iter_{int(text):07d}" if is_number else None
    return folder if folder is not None and (folder / STATE_FILE).is_file() else None


def read_progress(folder: Path) -> Progress:
    """Return where the run that saved a checkpoint was."""
    path = folder / STATE_FILE
    try:
        progress = Progress(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    for name, default in asdict(Progress()).items():
        value = getattr(progress, name)
        if type(value) is not type(default) or (isinstance(value, int) and value < 0):
            found = json.dumps(value)[:40]
            raise ConfigError(f"{path}: {name} is {found}, not {KINDS[type(default)]}: is damaged")
    if folder.name.startswith("iter_") and folder.name != f"iter_{progress.iteration:07d}":
        raise ConfigError(
            f"{path}: is of iteration {progress.iteration}, not of the folder it is in"
        )
    return progress


def newest_good(root: str | os.PathLike[str], iteration: int) -> Path | None:
    """Return the newest checkpoint up to an iteration that was not saved in a NaN streak."""
    for folder in sorted(Path(root).glob("iter_*"), reverse=True):
        number = folder.name.removeprefix("iter_")
        try:
            if int(number) <= iteration and not read_progress(folder).nan_streak:
                return folder
        except (ConfigError, ValueError):  # damaged, or not of a training
            continue
    return None


def to_resume(options: RunOptions, *, is_training: bool = True) -> Path | None:
    """Return the training checkpoint to go on from: that in --save, else --load if it is one.

    What does not train can do with the weights of one that says nothing about its run.
    """
    load, save = options.load, options.save
    if save is not None and not options.no_auto_resume:
        if (found := newest(save)) is not None:
            return found
        if load is None or Path(load).resolve() != Path(save).resolve():
            _must_be_new(save)
        else:
            _must_be_no_training(f"--load {load}", load)
    if load is None or options.finetune or options.from_scratch:
        return None
    if (Path(load) / STATE_FILE).is_file():  # one iteration was given
        return Path(load)
    if (found := newest(load)) is None and is_training:
        _must_be_no_training(f"--load {load}", load)
    return found


def _must_be_new(root: str) -> None:
    """Refuse a folder whose tracker names a training that is not there: it would be overwritten."""
    tracker = Path(root) / TRACKER
    if not tracker.exists():
        return
    named = tracker.read_bytes()[:40].decode("utf-8", "replace").strip()
    if named != "release":  # converted weights, of no training
        _must_be_no_training(f"--save {root}", root)
        raise ConfigError(
            f"--save {root}: {TRACKER} says {named!r}, and no training to go on with is there: put "
            "it right, choose another --save, or give --no-auto-resume to start from the beginning"
        )


def _must_be_no_training(flag: str, root: str) -> None:
    """Refuse an iteration that lost the file which says where its run was."""
    try:
        found = detect(root)
    except ConfigError:
        return  # it is refused, with its reason, when its weights are read
    if found.kind == "torch_dist" and found.folder.name.startswith("iter_"):
        raise ConfigError(
            f"{flag}: {found.folder} has no {STATE_FILE}, so its training cannot be resumed: put "
            "the file back, or start a new run from its weights with --finetune, --load "
            f"{found.folder} and another --save"
        )


def verify_state(folder: Path, options: RunOptions) -> None:
    """Verify what says where a run was, before anything follows from it."""
    try:
        verify_small(folder, enabled=not options.no_verify)
    except ConfigError as error:
        raise ConfigError(f"{error}{_advice(folder)}") from None


def agreed_to_resume(options: RunOptions) -> Path | None:
    """Return what the first rank goes on from: only it holds --save, so it sees no other's work."""
    choice = [to_resume(options)]
    torch.distributed.broadcast_object_list(choice)
    return choice[0]


class Mismatch(ConfigError):
    """A checkpoint is whole, but not of this run's model: an older one would be no better."""


class Loads(Protocol):
    """What reads this rank's part of a training checkpoint."""

    def load(self, folder: Path, *, with_optimizer: bool, verify: bool = True) -> None:
        """Fill the model and, if wanted, its optimizer."""


def go_on(checkpoints: Loads, folder: Path, options: RunOptions) -> Progress:
    """Load a training checkpoint and return where its run was."""
    progress = read_progress(folder)
    with_optimizer = progress.has_optimizer and not options.no_load_optim
    try:
        checkpoints.load(folder, with_optimizer=with_optimizer, verify=not options.no_verify)
    except Mismatch:
        raise
    except ConfigError as error:
        raise ConfigError(f"{error}{_advice(folder)}") from None
    logger.info("going on after iteration %d (%s)", progress.iteration, folder)
    if not with_optimizer:
        unsaved = "it was not saved (--no-save-optim)"
        why = "--no-load-optim" if progress.has_optimizer else unsaved
        logger.warning("the optimizer state is reset: %s", why)
    return progress


def _advice(damaged: Path) -> str:
    """Say how to go on from the checkpoint before one that cannot be loaded."""
    older = newest_good(damaged.parent, int(damaged.name.removeprefix("iter_")) - 1)
    if older is None:
        return ""
    last = int(older.name.removeprefix("iter_"))
    return f"; to go on from iteration {last}, put {last} into {damaged.parent / TRACKER}"


class CheckpointFolders:
    """The checkpoints of one run in their folder; every rank takes part in `new` and `commit`."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def new(self, iteration: int) -> Path:
        """Return an empty folder that no other process, even one left over, writes in."""
        name = [f".iter_{iteration:07d}{ASIDE}{secrets.token_hex(4)}"]
        if torch.distributed.get_rank() == 0:
            self._remove_incomplete()
            (self._root / name[0]).mkdir(parents=True)
        torch.distributed.broadcast_object_list(name)
        return self._root / name[0]

    def commit(
        self,
        aside: Path,
        progress: Progress,
        keep_last: int | None,
        written: Mapping[str, FileRecord],
        **layout: int,
    ) -> None:
        """Give a checkpoint its name once all ranks have written; then name it the newest.

        `written` are the digests of what all ranks have written, which the first rank has.
        """
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            final = self._root / f"iter_{progress.iteration:07d}"
            atomic_write_text(aside / STATE_FILE, json.dumps(asdict(progress)) + "\n")
            if progress.lora:
                atomic_write_text(
                    aside / ADAPTER_CONFIG, json.dumps(progress.lora, indent=2) + "\n"
                )
            _write_digests(aside, progress.iteration, written, layout)
            fsync_tree(aside)
            self._rename(aside, final)
            atomic_write_text(self._root / TRACKER, f"{progress.iteration}\n")
            logger.info("saved iteration %d in %s", progress.iteration, final)
            if keep_last is not None:
                self._forget(final, keep_last)
        torch.distributed.barrier()

    @contextmanager
    def explained(self, iteration: int, *more: type[Exception]) -> Iterator[None]:
        """Say in one line why a checkpoint could not be written, and remove what there is of it."""
        from torch.distributed.checkpoint import CheckpointException

        try:
            yield
        except (OSError, RuntimeError, CheckpointException, *more) as error:
            if isinstance(error, RuntimeError) and not disk.is_hidden(error):
                raise
            why = disk.explain(reason(error), self._root, newest(self._root))
            if torch.distributed.get_rank() == 0:
                self._remove_incomplete()
            raise ConfigError(
                f"--save {self._root}: iteration {iteration} could not be saved ({why}); what "
                "was saved before is intact: put this right and give the same command again"
            ) from None

    def _remove_incomplete(self) -> None:
        for left_over in self._root.glob(f".iter_*{ASIDE}*"):
            shutil.rmtree(left_over, ignore_errors=True)

    def _rename(self, aside: Path, final: Path) -> None:
        old = final.with_name(f".{final.name}{ASIDE}replaced")
        if final.exists():  # of a run that starts again, or one that was killed before the tracker
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(aside, final)
        shutil.rmtree(old, ignore_errors=True)

    def _forget(self, newest: Path, keep_last: int) -> None:
        """Remove older checkpoints; each loses its name before its files."""
        older = sorted(path for path in self._root.glob("iter_*") if path.name <= newest.name)
        for path in older[:-keep_last]:
            gone = path.with_name(f".{path.name}{ASIDE}forgotten")
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)


def _write_digests(
    folder: Path, iteration: int, written: Mapping[str, FileRecord], layout: Mapping[str, int]
) -> None:
    ranks = {name: {"rank": int(found[1])} for name in written if (found := SHARD.match(name))}
    world = torch.distributed.get_world_size()
    about = {"kind": "training", "iteration": iteration, "layout": {"world": world, **layout}}
    write_digests(folder, written, about, ranks)


def unloadable(folder: Path, error: BaseException) -> ConfigError:
    """Return the error of a checkpoint that cannot be loaded, with the file where it is known."""
    why = reason(error)
    is_named = why.startswith(str(folder))
    return ConfigError(why if is_named else f"{folder}: cannot be loaded ({why})")


def reason(error: BaseException) -> str:
    """Find the error of the disk in what wraps it."""
    failures = getattr(error, "failures", None) or {}
    first = next((pair[0] for pair in failures.values()), error)
    text = getattr(first, "strerror", None) or str(first) or type(first).__name__
    if hasattr(error, "failures") and not failures:
        return "the first rank says why"
    return str(text).strip().splitlines()[-1]
