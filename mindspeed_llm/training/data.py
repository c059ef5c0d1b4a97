"""The data of a run: data files are preprocessed once, token files are checked once."""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from mindspeed.checkpoint.commit import atomic_write
from mindspeed.config import ConfigError, Spelling
from mindspeed.training.checkpoint_dir import find_resume
from mindspeed.training.stages import ONLINE
from mindspeed_llm.data.handlers import PRETRAIN, find_handler, similar_handlers
from mindspeed_llm.data.indexed import TokenFile, find_out_of_range
from mindspeed_llm.data.instruction import split_weights
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.plan import make_plan
from mindspeed_llm.data.preprocess import FORMAT, NEUTRAL_OPTIONS, preprocess
from mindspeed_llm.data.readers import FORMATS, Source
from mindspeed_llm.data.template import load_template
from mindspeed_llm.data.tokenizer import TokenizerFacts, has_tokenizer, load_facts
from mindspeed_llm.training.options import RAW_FIELDS, TrainOptions

logger = logging.getLogger(__name__)

PAUSE = 10.0
"""Seconds between two broadcasts to the waiting ranks, well below the time-out of groups."""
READ_BYTES = 1 << 22
ALWAYS_USED = {"cache_dir", "trust_remote_code"}
"""Options of preprocessing that matter for token files, too."""
_Result = TypeVar("_Result")


def token_prefixes(
    options: TrainOptions, handler: str, tokenizer: Path | None, limit: int | None
) -> tuple[str, ...]:
    """Return --data-path with every data file replaced by the prefix of its tokens.

    The first rank preprocesses what has not been before; the others wait. `handler` is that of
    the task, `tokenizer` the folder of the model's, `limit` the longest sample.
    """
    _, paths = split_weights(options.data_path)
    raw = [path for path in paths if Path(path).suffix.lower().removeprefix(".") in FORMATS]
    _check_names(options)
    if not raw:
        _log_ignored(options)
        return options.data_path

    def prepare() -> dict[str, str]:
        return {
            path: _prepare(_as_preprocess(options, path, handler, tokenizer, limit)) for path in raw
        }

    try:
        found = on_first_rank(prepare)
    except ConfigError as error:  # with the flag of the stage
        flag = "--max-prompt-length" if options.stage in ONLINE else "--seq-length"
        raise ConfigError(str(error).replace("--seq-length", flag)) from None
    return tuple(found.get(path, path) for path in options.data_path)


def _check_names(options: TrainOptions) -> None:
    """Raise for names of handlers and templates that do not exist, also where they are not used."""
    if options.handler_name is not None:
        find_handler(options.handler_name)
    if options.prompt_type not in (None, "tokenizer"):
        load_template(options.prompt_type, options.prompt_type_path)


def _log_ignored(options: TrainOptions) -> None:
    """Log the options of preprocessing that were given in vain."""
    defaults = {name: field.default for name, field in type(options).model_fields.items()}
    used = ALWAYS_USED | ({"reward_tokens"} if options.stage == "prm" else set())
    flags = [
        Spelling.FLAG.name_of(name)
        for name in ("handler_name", *RAW_FIELDS)
        if name not in used and getattr(options, name) != defaults[name]
    ]
    if flags:
        logger.info("%s: no effect, --data-path names token files", ", ".join(flags))


def _as_preprocess(
    options: TrainOptions, path: str, handler: str, tokenizer: Path | None, limit: int | None
) -> PreprocessOptions:
    chosen = options.handler_name or handler
    given, expected = find_handler(chosen), find_handler(handler)
    if given is not None and expected is not None:
        known = similar_handlers(expected)
        if chosen not in known:
            raise ConfigError(
                f"--handler-name {chosen}: makes data of another kind than --stage {options.stage} "
                f"trains on: give {' or '.join(known)}"
            )
    if chosen == PRETRAIN and len(options.json_keys) > 1:
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)}: training takes one column")
    return PreprocessOptions(
        input=path,
        output_prefix="-",  # known when the content is
        handler_name=chosen,
        tokenizer_name_or_path=options.tokenizer_name_or_path
        or (None if tokenizer is None else str(tokenizer)),
        # Documents are cut to --seq-length by training, not dropped.
        seq_length=None if chosen == PRETRAIN else limit,
        neat_pack=options.neat_pack,
        **{name: getattr(options, name) for name in RAW_FIELDS},
    )


def _prepare(options: PreprocessOptions) -> str:
    """Preprocess one file unless it has been; return the prefix of its tokens."""
    try:
        folder = _folder(options)
        prefix = str(folder / "data")
        with _locked(folder):
            if Path(f"{prefix}.summary.json").is_file():  # published last
                logger.info("%s: preprocessed before, in %s", options.input, folder)
            else:
                logger.info("%s: preprocessing into %s", options.input, folder)
                _preprocess(options.model_copy(update={"output_prefix": prefix}))
    except ConfigError as error:  # with the flag of this command
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
        done.trained,
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
    others = options.model_dump(exclude=NEUTRAL_OPTIONS | {"input", "tokenizer_name_or_path"})
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
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def on_first_rank(work: Callable[[], _Result]) -> _Result:
    """Return what the first rank's work returns, never None; every rank raises what it raises."""
    is_first = torch.distributed.get_rank() == 0
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work) if is_first else None
        while True:
            result: list[_Result | ConfigError | None] = [None]
            if future is not None:
                try:
                    result = [future.result(PAUSE)]
                except NotYet:
                    pass
                except ConfigError as error:
                    result = [error]
                except OSError as error:  # the others would wait for ever
                    result = [ConfigError(f"{error.filename}: cannot be read ({error.strerror})")]
            torch.distributed.broadcast_object_list(result)
            if isinstance(result[0], ConfigError):
                raise result[0]
            if result[0] is not None:
                return result[0]


def check_tokens(files: Sequence[TokenFile], vocabulary: int, cache_dir: str | None) -> None:
    """Raise for files with tokens that the model has no embedding for; every rank checks a share.

    A file that passed is marked in the cache until its path, size or modification time changes.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    marks = [_mark(file, vocabulary, cache_dir) for file in files]
    # The first rank decides what is left to do: another may see another cache.
    is_left = [[not mark.exists() for mark in marks]]
    torch.distributed.broadcast_object_list(is_left)
    todo = [pair for pair, left in zip(zip(files, marks), is_left[0]) if left]
    if not todo:
        return
    wrong = next(filter(None, (_wrong(file, vocabulary, rank, world) for file, _ in todo)), None)
    found: list[str | None] = [None] * world
    torch.distributed.all_gather_object(found, wrong)
    for text in filter(None, found):
        raise ConfigError(text)
    if rank == 0:
        _write_marks([mark for _, mark in todo])


def check_tokenizer(
    summaries: Mapping[str, Mapping[str, Any]], options: TrainOptions, folder: Path | None
) -> None:
    """Raise for token files of a tokenizer whose ids mean other tokens than the model's.

    `summaries` are those of preprocessing by prefix, {} where there is none; `folder` is that of
    the model. A run that resumes was compared at its start, and must have the same data.
    """

    def compare() -> dict[str, str]:
        is_known = any("tokenizer_fingerprint" in summary for summary in summaries.values())
        if not is_known or find_resume(options) is not None:
            return {}
        tokenizer = _model_tokenizer(options, folder)
        if tokenizer is None:
            return {}
        for prefix, summary in summaries.items():
            if not _has_same_ids(summary, tokenizer):
                raise ConfigError(
                    f"{prefix}: its tokenizer ({summary.get('tokenizer')}) has other tokens or ids "
                    f"than the model's ({tokenizer.source}): preprocess with the tokenizer of the "
                    "model, or give --allow-other-tokenizer if these are ids of the model"
                )
        return {}

    if not options.allow_other_tokenizer:
        on_first_rank(compare)


def _has_same_ids(summary: Mapping[str, Any], tokenizer: TokenizerFacts) -> bool:
    """Return whether data was made by a tokenizer with the same ids, as far as it is recorded."""
    if summary.get("tokenizer_fingerprint") in (None, tokenizer.fingerprint):
        return True
    return summary.get("ids_fingerprint") == tokenizer.ids_fingerprint


def _model_tokenizer(options: TrainOptions, folder: Path | None) -> TokenizerFacts | None:
    """Describe the tokenizer beside the model, else the one given; None without a readable one."""
    given = options.tokenizer_name_or_path
    path = str(folder) if folder is not None and has_tokenizer(folder) else given
    if path is None:
        return None
    try:
        return load_facts(
            path, cache_dir=options.cache_dir, trust_remote_code=options.trust_remote_code
        )
    except ConfigError as error:
        logger.warning("data is not compared with the tokenizer of the model: %s", error)
        return None


def _wrong(file: TokenFile, vocabulary: int, rank: int, world: int) -> str | None:
    found = find_out_of_range(file, vocabulary, (rank, world))
    if found is None:
        return None
    position, token = found
    return (
        f"{file.path}: token {token} (number {position}) is not one of the model's, which are 0 to "
        f"{vocabulary - 1}: the file is damaged or was made with another tokenizer; preprocess "
        "with the tokenizer of the model"
    )


def _mark(file: TokenFile, vocabulary: int, cache_dir: str | None) -> Path:
    """Return the file whose existence means that exactly this file was checked."""
    now, base = file.path.stat(), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    known = (str(file.path.resolve()), now.st_size, now.st_mtime_ns, now.st_ino)
    key = repr((*known, str(file.dtype), file.is_labels, vocabulary))
    folder = Path(cache_dir or f"{base}/mindspeed").expanduser() / "checked"
    return folder / hashlib.sha256(key.encode()).hexdigest()[:24]


def _write_marks(marks: Sequence[Path]) -> None:
    try:
        for mark in marks:
            mark.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(mark, b"")
    except OSError as error:
        logger.warning("token files are checked again each time: %s", error)
