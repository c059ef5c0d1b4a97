"""Data files given to training: preprocessed once, and found again by their content."""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from mindspeed.config import ConfigError
from mindspeed_llm.data.handlers import PRETRAIN
from mindspeed_llm.data.instruction import split_weights
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.plan import make_plan
from mindspeed_llm.data.preprocess import FORMAT, HARMLESS, preprocess
from mindspeed_llm.data.readers import FORMATS, Source
from mindspeed_llm.training.options import RAW_FIELDS, TrainOptions

logger = logging.getLogger(__name__)

PAUSE = 10.0
"""Seconds after which waiting ranks log that the work goes on; they give up at some point."""
READ_BYTES = 1 << 22


def token_prefixes(options: TrainOptions, handler: str, tokenizer: Path | None) -> tuple[str, ...]:
    """Return --data-path with every data file replaced by the prefix of its tokens.

    The first rank preprocesses what has not been before; the others wait. `handler` is that of
    the task, `tokenizer` the folder of the model's.
    """
    _, paths = split_weights(options.data_path)
    raw = [path for path in paths if Path(path).suffix.lower().removeprefix(".") in FORMATS]
    if not raw:
        return options.data_path

    def prepare() -> dict[str, str]:
        return {path: _prepare(_as_preprocess(options, path, handler, tokenizer)) for path in raw}

    found = _on_first_rank(prepare)
    return tuple(found.get(word, word) for word in options.data_path)


def _as_preprocess(
    options: TrainOptions, path: str, handler: str, tokenizer: Path | None
) -> PreprocessOptions:
    chosen = options.handler_name or handler
    if chosen == PRETRAIN and len(options.json_keys) > 1:
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)}: training takes one column")
    return PreprocessOptions(
        input=path,
        output_prefix="-",  # known when the content is
        handler_name=chosen,
        tokenizer_name_or_path=options.tokenizer_name_or_path or (tokenizer and str(tokenizer)),
        # Documents are cut to --seq-length by training, not dropped.
        seq_length=None if chosen == PRETRAIN else options.seq_length,
        neat_pack=options.neat_pack,
        **{name: getattr(options, name) for name in RAW_FIELDS},
    )


def _prepare(options: PreprocessOptions) -> str:
    """Preprocess one file unless it has been; return the prefix of its tokens."""
    try:
        folder = _folder(options)
        prefix = str(folder / "data")
        with _alone(folder):
            if Path(f"{prefix}.summary.json").is_file():  # published last
                logger.info("%s: preprocessed before, in %s", options.input, folder)
            else:
                logger.info("%s: preprocessing into %s", options.input, folder)
                _preprocess(options.model_copy(update={"output_prefix": prefix}))
    except ConfigError as error:  # in the words of this command
        raise ConfigError(str(error).replace("--input", "--data-path")) from None
    except OSError as error:
        raise ConfigError(
            f"--cache-dir: {error.filename} cannot be written ({error.strerror}): choose another"
        ) from None
    is_documents = options.handler_name == PRETRAIN
    return f"{prefix}_{options.json_keys[0]}_document" if is_documents else prefix


def _preprocess(options: PreprocessOptions) -> None:
    done = preprocess(options)
    logger.info(
        "%d records in = %d written + %d skipped, %d tokens, of which %d are trained",
        done.records,
        done.written,
        done.skipped_records,
        done.tokens,
        done.learnt,
    )
    for reason, tally in done.skipped.items():
        logger.warning("skipped %d x %s (first: %s)", tally.count, reason, tally.first)
    if done.is_chat and options.seq_length is not None:
        logger.info("too long: %s", done.describe_too_long(options))
    if done.truncated.count:
        logger.warning("samples were cut: they may lack the end-of-text token")


def _folder(options: PreprocessOptions) -> Path:
    """Return the folder named after all that decides what is in it."""
    plan, sources = make_plan(options)
    decides = asdict(plan) | {"facts": plan.facts.fingerprint, "accelerate": None}
    others = options.model_dump(exclude=HARMLESS | {"input", "tokenizer_name_or_path"})
    content = json.dumps([FORMAT, decides, others], sort_keys=True, default=str).encode()
    digest = hashlib.blake2b(content, digest_size=8)
    for source in sources:
        for block in _content(source):
            digest.update(block)
    base = options.cache_dir or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/mindspeed"
    name = f"{Path(options.input or '').stem}-{digest.hexdigest()}"
    return Path(base).expanduser() / "data" / name


def _content(source: Source) -> Iterator[bytes]:
    yield f"{source.format} {source.size} ".encode()
    with open(source.path, "rb") as file:
        while block := file.read(READ_BYTES):
            yield block


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other run works in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _on_first_rank(work: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Return what the first rank's work returns; what it raises, every rank raises."""
    is_first = torch.distributed.get_rank() == 0
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work) if is_first else None
        while True:
            note: list[dict[str, str] | ConfigError | None] = [None]
            if future is not None:
                try:
                    note = [future.result(PAUSE)]
                except NotYet:
                    pass
                except ConfigError as error:
                    note = [error]
            torch.distributed.broadcast_object_list(note)
            if isinstance(note[0], ConfigError):
                raise note[0]
            if note[0] is not None:
                return note[0]
