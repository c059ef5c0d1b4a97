"""Previews of preprocessed samples: spans of text that are trained, special, packed or cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed.config import ConfigError, parse_json
from mindspeed_llm.data.handlers.registry import HANDLERS
from mindspeed_llm.data.indexed import IGNORE_INDEX, Array, IndexedTokens, describe_folder
from mindspeed_llm.data.instruction import FIELDS, InstructionData
from mindspeed_llm.data.samples import ends_with_stop_token
from mindspeed_llm.data.tokenizer import TokenizerFacts, load_facts

ENDINGS = (".idx", ".bin")


@dataclass(frozen=True)
class Span:
    """Consecutive tokens with the same properties."""

    ids: list[int]
    text: str
    is_trained: bool
    is_special: bool
    sample_index: int
    starts_sample: bool
    is_truncated: bool = False

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.ids)


class SamplePreview:
    """One sequence as text."""

    fields = ""
    """What the reward is given beside a prompt, as JSON."""

    def __init__(self, name: str, ids: Array, labels: Array, mask: Array, decoder: Decoder) -> None:
        self.name = name
        self.size = int((mask != 0).sum())
        self.padding = len(ids) - self.size
        self._ids, self._labels, self._mask = ids[: self.size], labels[: self.size], mask
        self._decoder = decoder
        self.num_packed = int(mask.max(initial=0))
        self.is_ended = ends_with_stop_token(self._labels, decoder.stop_ids)
        self.needs_end = decoder.needs_end
        self.spans = list(self._spans())

    def tokens(self) -> Iterator[tuple[int, str, int | None]]:
        """Yield every token, its text, and the label if it is trained."""
        for token, label in zip(self._ids.tolist(), self._labels.tolist()):
            yield token, self._decoder.text([token]), None if label == IGNORE_INDEX else label

    @property
    def bounds(self) -> list[int]:
        """The start of each packed sample, and the end of the last."""
        changes = np.flatnonzero(np.diff(self._mask[: self.size])) + 1
        return [0, *changes.tolist(), self.size]

    def truncated_at(self, limit: int | None) -> Iterator[Span]:
        """Yield the spans; what lies beyond `limit` is marked as truncated."""
        position = 0
        for span in self.spans:
            kept = span.size if limit is None else max(0, min(span.size, limit - position))
            position += span.size
            for ids, truncated in ((span.ids[:kept], False), (span.ids[kept:], True)):
                if ids:
                    text = self._decoder.text(ids)
                    starts = span.starts_sample and (not truncated or kept == 0)
                    flags = {"is_truncated": truncated, "starts_sample": starts}
                    yield replace(span, ids=ids, text=text, **flags)

    def _spans(self) -> Iterator[Span]:
        special = np.isin(self._ids, list(self._decoder.special))
        trained = self._labels != IGNORE_INDEX
        sample_index = self._mask[: self.size]
        changes = np.flatnonzero(
            (np.diff(special) != 0) | (np.diff(trained) != 0) | (np.diff(sample_index) != 0)
        )
        boundaries = [0, *(changes + 1).tolist(), self.size] if self.size else []
        previous = 1
        for start, end in zip(boundaries, boundaries[1:]):
            ids, current = self._ids[start:end].tolist(), int(sample_index[start])
            text = self._decoder.text(ids)
            flags = bool(trained[start]), bool(special[start])
            yield Span(ids, text, *flags, current, starts_sample=current != previous)
            previous = current


class Decoder:
    """Ids to text."""

    def __init__(
        self, facts: TokenizerFacts, stop_ids: Iterable[int] = (), needs_end: bool = True
    ) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(facts.backend)
        self.special = set(facts.special.values())
        self.stop_ids = {facts.eos_id, *stop_ids}
        self._size = facts.size
        self.needs_end = needs_end
        """Whether samples should end with a stop token."""

    def text(self, ids: list[int]) -> str:
        """Return the text of some ids; an id beyond the vocabulary shows as a number."""
        if all(0 <= one < self._size for one in ids):
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))
        return "".join(f"<{one}?>" for one in ids)


class Preview(NamedTuple):
    """Preprocessed data as text, sample by sample."""

    data: Any
    decoder: Decoder

    def size(self) -> int:
        """The number of samples."""
        return len(self.data)

    def samples(self, number: int) -> Iterator[SamplePreview]:
        """Yield the sequences of one sample: one, or the chosen and the rejected."""
        row = self.data[number]
        if not isinstance(row, dict):
            ids = np.asarray(row).astype(np.int64)
            yield SamplePreview("", ids, ids, np.ones(len(ids), np.int32), self.decoder)
            return
        for side in ("chosen_", "rejected_") if "chosen_labels" in row else ("",):
            ids = row[f"{side}input_ids"]
            labels = row.get(f"{side}labels", np.full(len(ids), IGNORE_INDEX))
            mask = row.get(f"{side}attention_mask", np.ones(len(ids), np.int32))
            name = f" ({side.removesuffix('_')})" if side else _judgement(row)
            sample = SamplePreview(name, ids, labels, mask, self.decoder)
            if FIELDS in row:
                sample.fields = bytes(row[FIELDS].astype(np.uint8)).decode("utf-8", "replace")
            yield sample


def _judgement(row: dict[str, Array]) -> str:
    """Return whether an unpaired completion is desirable, "" for other samples."""
    if "desirable" not in row:
        return ""
    return " (desirable)" if row["desirable"].any() else " (undesirable)"


def open_preview(prefix: str, tokenizer: str = "", cache_dir: str = "") -> Preview:
    """Open samples or documents by their prefix; the tokenizer is that of preprocessing."""
    bare = next((prefix.removesuffix(e) for e in ENDINGS if prefix.endswith(e)), prefix)
    if (folder := Path(prefix)).is_dir():  # that may hold both, samples and documents
        names = (path.stem for path in folder.glob("*_document.idx"))
        prefixes = (n.rpartition("_packed_")[0] or n.removesuffix("_text_document") for n in names)
        raise ConfigError(describe_folder(folder, prefixes))
    data: Any
    if Path(f"{bare}.idx").is_file():
        data, output_prefix = IndexedTokens(bare), bare.rpartition("_")[0].rpartition("_")[0]
    elif Path(f"{bare}_text_document.idx").is_file():
        data, output_prefix = IndexedTokens(f"{bare}_text_document"), bare
    else:
        data, output_prefix = InstructionData(bare), bare
    metadata = _read_metadata(output_prefix)
    path = metadata.pop("tokenizer", "")
    path = tokenizer or path
    if not path:
        raise ConfigError(
            f"{output_prefix}.summary.json does not name the tokenizer: "
            "give --tokenizer-name-or-path"
        )
    facts = load_facts(path, cache_dir=cache_dir)
    return Preview(data, Decoder(facts, **metadata))


def _read_metadata(prefix: str) -> dict[str, Any]:
    """Return what is known of preprocessing: tokenizer, stop tokens, and if samples need one."""
    try:
        metadata = parse_json(Path(f"{prefix}.summary.json").read_bytes())
        stop_ids = [int(token) for token in metadata.get("stop_ids", ())]
        handler = HANDLERS.get(metadata.get("handler"))
        needs_end = handler is None or handler.ends_with_answer()
        return {
            "tokenizer": str(metadata["tokenizer"]),
            "stop_ids": stop_ids,
            "needs_end": needs_end,
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return {}
