"""The work folder of a run, and its end: pack, index and publish under final names.

A run writes to a folder beside the output, so that nothing unfinished has a final name. A killed
run leaves the folder; the same command resumes from the last state saved in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed.checkpoint.commit import atomic_write, fsync_path
from mindspeed.config import ConfigError, parse_json
from mindspeed_llm.data.handlers import PRETRAIN, find_handler
from mindspeed_llm.data.indexed import CHUNK, IndexedTokens, TokenWriter
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.packing import write_rows
from mindspeed_llm.data.plan import Plan, make_chat, make_encoder
from mindspeed_llm.data.samples import end_of_answer
from mindspeed_llm.data.summary import Summary


class Workspace:
    """`{prefix}.partial/`, held by one run at a time."""

    def __init__(self, prefix: str, fingerprint: str) -> None:
        self.prefix = Path(prefix)
        self.folder = Path(f"{prefix}.partial")
        self._fingerprint = fingerprint
        self._make_folder()
        self._lock = self._take_lock()
        self.state = self._read_state()
        """The saved state of an earlier attempt at this run; empty without one."""
        if not self.state:
            self._clear()

    @property
    def is_publishing(self) -> bool:
        """Whether everything is done except the renaming to final names."""
        return "publish" in self.state

    def _make_folder(self) -> None:
        if not self.prefix.name or self.prefix.is_dir():
            raise ConfigError(
                f"--output-prefix {self.prefix} is a folder: add how the names of the files begin, "
                f"such as {self.prefix / 'data'}"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--output-prefix {self.prefix}: {self.folder} cannot be created: {error.strerror}"
            ) from None

    def _take_lock(self) -> int:
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ConfigError(
                f"--output-prefix {self.prefix}: another run is writing there now"
            ) from None
        return lock

    def _read_state(self) -> dict[str, Any]:
        try:
            state = parse_json((self.folder / "state.json").read_bytes())
            is_ours = state["fingerprint"] == self._fingerprint
            return state["state"] if is_ours and self._has_files(state["state"]) else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _has_files(self, state: dict[str, Any]) -> bool:
        """Return whether the files written before the state was saved still exist."""
        expected = state.get("sizes", {}).items()
        return all((self.folder / name).stat().st_size >= size for name, size in expected)

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def save(self, state: Mapping[str, Any]) -> None:
        """Save the progress of the run."""
        content = {"fingerprint": self._fingerprint, "state": state}
        atomic_write(self.folder / "state.json", json.dumps(content).encode())

    def publish(self, files: Mapping[str, Path], state: Mapping[str, Any]) -> None:
        """Move finished files to their final names, and remove the folder.

        `files` maps names in the folder to final paths, each index after its data. If the run is
        killed in the middle the next one does the rest, so the mapping is saved first.
        """
        for name in files:
            fsync_path(self.folder / name)
        self.state = {**state, "publish": {name: str(final) for name, final in files.items()}}
        self.save(self.state)
        # An index makes data readable, so an old one is removed before its data is replaced.
        for final in files.values():
            if final.suffix == ".idx":
                final.unlink(missing_ok=True)
        fsync_path(self.prefix.parent)
        self.resume_publish()

    def resume_publish(self) -> None:
        """Move the files that do not have their final names yet, and remove the folder."""
        for name, final in self.state["publish"].items():
            if (self.folder / name).exists():
                os.replace(self.folder / name, final)
        fsync_path(self.prefix.parent)
        shutil.rmtree(self.folder)
        self.release()

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def release(self) -> None:
        """Release the lock on the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def token_files(options: PreprocessOptions) -> str:
    """Return the prefix of the token files: several files of one sample are called packed."""
    return f"{options.output_prefix}{'' if options.handler_name == PRETRAIN else '_packed'}"


def finalize(
    plan: Plan,
    options: PreprocessOptions,
    workspace: Workspace,
    writers: dict[str, TokenWriter],
    summary: Summary,
) -> None:
    """Pack, index and publish what was encoded."""
    if not summary.written:
        raise ConfigError(_no_records_message(options, summary))
    if not summary.tokens:
        raise ConfigError(
            f"{summary.written} records without a single token: check --json-keys, and whether "
            f"{options.tokenizer_name_or_path} is the tokenizer of such text"
        )
    folder, prefix = workspace.folder, token_files(options)
    if options.pack:
        writers, summary.rows = write_rows(
            folder,
            writers,
            capacity=options.seq_length or 0,
            pad_id=plan.facts.pad_id,
            neat=options.neat_pack,
        )
    files: dict[str, Path] = {}
    for key, writer in writers.items():
        writer.build_index(folder / f"{key}.idx")
        files[writer.data_path.name] = Path(f"{prefix}_{key}_document.bin")
    files |= {f"{key}.idx": Path(f"{prefix}_{key}_document.idx") for key in writers}
    files[_write_summary(plan, options, folder, summary)] = Path(
        f"{options.output_prefix}.summary.json"
    )
    workspace.publish(files, {"summary": summary.as_dict()})


def _no_records_message(options: PreprocessOptions, summary: Summary) -> str:
    reasons = ", ".join(f"{tally.count} {reason}" for reason, tally in summary.skipped.items())
    is_long = summary.longest > (options.seq_length or summary.longest)
    advice = f"; the longest has {summary.longest}: raise --seq-length" if is_long else ""
    return (
        f"--input {options.input}: none of {summary.records} records can be "
        f"used ({reasons or 'there are none'}){advice}"
    )


def _write_summary(plan: Plan, options: PreprocessOptions, folder: Path, summary: Summary) -> str:
    """Write the metadata that later steps read; return the name of the file."""
    content = {
        "handler": options.handler_name,
        "prompt_type": options.prompt_type,
        "tokenizer": str(Path(plan.facts.source).resolve()),
        "tokenizer_fingerprint": plan.facts.fingerprint,
        "ids_fingerprint": plan.facts.ids_fingerprint,
        "vocabulary": plan.facts.size,
        "pad_id": plan.facts.pad_id,
        **_ends_of_answers(plan, options),
        "seq_length": options.seq_length,
        "pack": ("neat" if options.neat_pack else "plain") if options.pack else None,
        "summary": summary.as_dict(),
    }
    path = folder / "summary.json"
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
    return path.name


def _ends_of_answers(plan: Plan, options: PreprocessOptions) -> dict[str, list[int]]:
    """Return the tokens that may end a sample, and what a chat template ends an answer with."""
    handler = find_handler(options.handler_name)
    if handler is not None and handler.needs_chat:
        chat = make_chat(plan)
        encoder = make_encoder(replace(plan, accelerate=False))  # one text: loading takes longer
        end = end_of_answer(chat, encoder)
        return {"stop_ids": list(chat.stop_ids), "answer_end_ids": end}
    eos_id = plan.facts.eos_id
    return {"stop_ids": [] if eos_id is None else [eos_id], "answer_end_ids": []}


def merge_groups(options: PreprocessOptions) -> dict[str, int]:
    """Merge, for every key, the pairs whose names contain it; return the number of pairs."""
    folder = Path(options.input or "")
    if not folder.is_dir():
        raise ConfigError(f"--input {folder}: --merge-group-keys needs a folder of .bin/.idx pairs")
    if not options.output_prefix:
        raise ConfigError("--output-prefix is missing: give a path and how the names begin")
    names = sorted(path.with_suffix("") for path in folder.glob("*.idx"))
    groups = {key: [n for n in names if key in n.name] for key in options.merge_group_keys}
    for key, members in groups.items():
        if not members:
            found = ", ".join(name.name for name in names[:5]) or "none"
            raise ConfigError(
                f"--merge-group-keys {key}: no pair in {folder} has that in its name; "
                f"found: {found}"
            )
    return {f"{options.output_prefix}_{key}": _merge(options, key, g) for key, g in groups.items()}


def _merge(options: PreprocessOptions, key: str, members: list[Path]) -> int:
    parts = [IndexedTokens(str(member)) for member in members]
    kinds = sorted({str(part.dtype) for part in parts})
    if len(kinds) > 1:
        raise ConfigError(f"--merge-group-keys {key}: the pairs hold {' and '.join(kinds)} tokens")
    final = f"{options.output_prefix}_{key}"
    workspace = Workspace(final, fingerprint="merge")
    try:
        writer = TokenWriter(workspace.folder, "tokens", parts[0].dtype)
        for part in parts:
            _append(writer, part)
        writer.build_index(workspace.folder / "tokens.idx")
        files = {"tokens.bin": Path(f"{final}.bin"), "tokens.idx": Path(f"{final}.idx")}
        workspace.publish(files, {})
    finally:
        workspace.release()
    return len(parts)


def _append(writer: TokenWriter, part: IndexedTokens) -> None:
    """Copy a pair in chunks; documents keep their boundaries."""
    documents = part.documents
    for first in range(0, len(documents) - 1, CHUNK):
        ends = documents[first : first + CHUNK + 1]
        start, end = int(ends[0]), int(ends[-1])
        tokens = [part[index] for index in range(start, end)]
        joined = np.concatenate([*tokens, np.zeros(0, part.dtype)], dtype=part.dtype)
        writer.append(joined, part.lengths[start:end], ends[1:] - start)
