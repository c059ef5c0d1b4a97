"""Token files are checked once, before the first step: every rank looks at its share of them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from mindspeed.checkpoint.fsync import write_atomic
from mindspeed.config import ConfigError
from mindspeed_llm.data.indexed import TokenFile, find_outside

logger = logging.getLogger(__name__)


def check_tokens(files: Sequence[TokenFile], vocabulary: int, cache_dir: str | None) -> None:
    """Refuse files with tokens that the model has no embedding for.

    What was found to be right is remembered until the file, its size or its time changes.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    notes = [_note(file, vocabulary, cache_dir) for file in files]
    # The first rank decides what is left to do: another may see another cache.
    is_left = [[not note.exists() for note in notes]]
    torch.distributed.broadcast_object_list(is_left)
    todo = [pair for pair, left in zip(zip(files, notes), is_left[0]) if left]
    if not todo:
        return
    wrong = next(filter(None, (_wrong(file, vocabulary, rank, world) for file, _ in todo)), None)
    found: list[str | None] = [None] * world
    torch.distributed.all_gather_object(found, wrong)
    for text in filter(None, found):
        raise ConfigError(text)
    if rank == 0:
        _remember([note for _, note in todo])


def _wrong(file: TokenFile, vocabulary: int, rank: int, world: int) -> str | None:
    found = find_outside(file, vocabulary, (rank, world))
    if found is None:
        return None
    place, token = found
    return (
        f"{file.path}: token {token} (number {place}) is not one of the model's, which are 0 to "
        f"{vocabulary - 1}: the file is damaged or was made with another tokenizer; preprocess "
        "with the tokenizer of the model"
    )


def _note(file: TokenFile, vocabulary: int, cache_dir: str | None) -> Path:
    """Return the file whose presence says that exactly this file was checked."""
    now, base = file.path.stat(), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    known = (str(file.path.resolve()), now.st_size, now.st_mtime_ns, now.st_ino)
    key = repr((*known, str(file.dtype), file.is_labels, vocabulary))
    folder = Path(cache_dir or f"{base}/mindspeed").expanduser() / "checked"
    return folder / hashlib.sha256(key.encode()).hexdigest()[:24]


def _remember(notes: Sequence[Path]) -> None:
    try:
        for note in notes:
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(note, b"")
    except OSError as error:
        logger.warning("token files are checked again each time: %s", error)
