"""The reference's log-probabilities of all samples, computed once and kept in a file."""

import hashlib
import io
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from mindspeed.checkpoint.commit import atomic_write
from mindspeed.checkpoint.detection import detect
from mindspeed_llm.data.indexed import Array
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.training.options import TrainOptions

logger = logging.getLogger(__name__)

DIGEST = hashlib.sha256().digest_size


def table_path(options: TrainOptions, shape: ModelConfig, data: Sequence[InstructionData]) -> Path:
    """Return the file that is named after all that decides what is in it.

    The shape is not always that of a file beside the weights (--hf-cfg-dir).
    """
    source = options.ref_model or options.load
    assert source is not None  # --from-scratch is refused
    folder = detect(source).folder.resolve()
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    precision = "bf16" if options.bf16 else "fp16" if options.fp16 else "fp32"
    known = repr((stats, shape, precision, [one.fingerprint for one in data]))
    base = options.cache_dir or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/mindspeed"
    name = hashlib.sha256(known.encode()).hexdigest()[:24]
    return Path(base).expanduser() / "reference" / f"{name}.npy"


def read_table(path: Path, shape: tuple[int, int]) -> Array | None:
    """Return what the first rank finds in the file, on every rank; None if it is not there."""
    found: list[Array | None] = [None]
    if torch.distributed.get_rank() == 0 and path.is_file():
        found = [parse_table(path.read_bytes(), shape)]
        if found[0] is not None:
            logger.info("the reference's log-probabilities are those of %s", path)
        else:
            logger.warning("%s: is damaged, and computed again", path)
    torch.distributed.broadcast_object_list(found)
    return found[0]


def write_table(path: Path, table: Array) -> None:
    """Keep a table for later runs; the first rank writes."""
    if torch.distributed.get_rank() != 0:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, serialize_table(table))
        logger.info(
            "the reference's log-probabilities of %d pairs are kept in %s", len(table), path
        )
    except OSError as error:  # they are only computed again
        logger.warning("%s: cannot be written (%s)", path, error.strerror)


def serialize_table(table: Array) -> bytes:
    """Return a .npy file followed by its digest, which numpy does not look at."""
    content = io.BytesIO()
    np.save(content, table, allow_pickle=False)
    return content.getvalue() + hashlib.sha256(content.getvalue()).digest()


def parse_table(content: bytes, shape: tuple[int, int]) -> Array | None:
    """Return the table of a file; None if anything of it is not as it was written.

    The header can only be that of this shape, so that nothing in the file is interpreted.
    """
    empty = np.zeros(shape, np.float32)
    whole = serialize_table(empty)
    header = whole[: len(whole) - DIGEST - empty.nbytes]
    body, digest = content[:-DIGEST], content[-DIGEST:]
    if len(content) != len(whole) or not body.startswith(header):
        return None
    table: Array = np.frombuffer(body, np.float32, offset=len(header)).reshape(shape)
    is_whole = hashlib.sha256(body).digest() == digest
    return table if is_whole and np.isfinite(table).all() else None
