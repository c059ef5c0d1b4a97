"""The end of a run over the data: pack, index, note what was made, and give files their names."""

from __future__ import annotations

import json
from pathlib import Path

from mindspeed.config import ConfigError
from mindspeed_llm.data.handlers import PRETRAIN, find_handler
from mindspeed_llm.data.indexed import TokenWriter
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.plan import Plan, make_chat
from mindspeed_llm.data.rows import write_rows
from mindspeed_llm.data.summary import Summary
from mindspeed_llm.data.workspace import Workspace


def token_files(options: PreprocessOptions) -> str:
    """Return how the names of the token files begin: a set of several is called packed."""
    return f"{options.output_prefix}{'' if options.handler_name == PRETRAIN else '_packed'}"


def finish(
    plan: Plan,
    options: PreprocessOptions,
    workspace: Workspace,
    writers: dict[str, TokenWriter],
    summary: Summary,
) -> None:
    """Pack, index and publish what was encoded."""
    if not summary.written:
        raise ConfigError(_nothing_left(options, summary))
    if not summary.tokens:
        raise ConfigError(
            f"{summary.written} records and not one token: check --json-keys, and whether "
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
    files[_write_facts(plan, options, folder, summary)] = Path(
        f"{options.output_prefix}.summary.json"
    )
    workspace.publish(files, {"summary": summary.as_dict()})


def _nothing_left(options: PreprocessOptions, summary: Summary) -> str:
    reasons = ", ".join(f"{tally.count} {reason}" for reason, tally in summary.skipped.items())
    is_long = summary.longest > (options.seq_length or summary.longest)
    advice = f"; the longest has {summary.longest}: raise --seq-length" if is_long else ""
    return (
        f"--input {options.input}: none of {summary.records} records can be "
        f"used ({reasons or 'there are none'}){advice}"
    )


def _write_facts(plan: Plan, options: PreprocessOptions, folder: Path, summary: Summary) -> str:
    """Write what later steps want to know about this data; return the name of the file."""
    content = {
        "handler": options.handler_name,
        "prompt_type": options.prompt_type,
        "tokenizer": str(Path(plan.facts.source).resolve()),
        "tokenizer_fingerprint": plan.facts.fingerprint,
        "vocabulary": plan.facts.size,
        "pad_id": plan.facts.pad_id,
        "stop_ids": list(_stop_ids(plan, options)),
        "seq_length": options.seq_length,
        "pack": ("neat" if options.neat_pack else "plain") if options.pack else None,
        "summary": summary.as_dict(),
    }
    path = folder / "summary.json"
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
    return path.name


def _stop_ids(plan: Plan, options: PreprocessOptions) -> tuple[int, ...]:
    """Return the tokens at which a sample may end."""
    handler = find_handler(options.handler_name)
    if handler is not None and handler.needs_chat:
        return make_chat(plan).stop_ids
    eos_id = plan.facts.eos_id
    return () if eos_id is None else (eos_id,)
