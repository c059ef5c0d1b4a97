"""Preprocessed samples as spans of text: what is trained, what is special, where packs begin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed.config import ConfigError, parse_json
from mindspeed_llm.data.indexed import IGNORED, Array, IndexedTokens
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.samples import learns_to_end
from mindspeed_llm.data.tokenizer import TokenizerFacts, load_facts

ENDINGS = (".idx", ".bin")


@dataclass(frozen=True)
class Span:
    """Tokens in a row that have everything in common."""

    ids: list[int]
    text: str
    is_learnt: bool
    is_special: bool
    segment: int
    opens_segment: bool
    is_lost: bool = False

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.ids)


class ShownSample:
    """One sequence, ready to be shown."""

    def __init__(self, name: str, ids: Array, labels: Array, mask: Array, decoder: Decoder) -> None:
        self.name = name
        self.size = int((mask != 0).sum())
        self.padding = len(ids) - self.size
        self._ids, self._labels, self._mask = ids[: self.size], labels[: self.size], mask
        self._decoder = decoder
        self.segments = int(mask.max(initial=0))
        self.is_ended = learns_to_end(self._labels, decoder.ends)
        self.spans = list(self._spans())

    def tokens(self) -> Iterator[tuple[int, str, int | None]]:
        """Yield every token, its text, and the label if it is trained."""
        for token, label in zip(self._ids.tolist(), self._labels.tolist()):
            yield token, self._decoder.text([token]), None if label == IGNORED else label

    def cut_at(self, limit: int | None) -> Iterator[Span]:
        """Yield the spans; what lies beyond `limit` is marked as lost."""
        place = 0
        for span in self.spans:
            room = span.size if limit is None else max(0, min(span.size, limit - place))
            place += span.size
            for ids, lost in ((span.ids[:room], False), (span.ids[room:], True)):
                if ids:
                    text = self._decoder.text(ids)
                    opens = span.opens_segment and (not lost or room == 0)
                    yield replace(span, ids=ids, text=text, is_lost=lost, opens_segment=opens)

    def _spans(self) -> Iterator[Span]:
        special = np.isin(self._ids, list(self._decoder.special))
        learnt = self._labels != IGNORED
        segment = self._mask[: self.size]
        changes = np.flatnonzero(
            (np.diff(special) != 0) | (np.diff(learnt) != 0) | (np.diff(segment) != 0)
        )
        borders = [0, *(changes + 1).tolist(), self.size] if self.size else []
        before = 1
        for start, end in zip(borders, borders[1:]):
            ids, here = self._ids[start:end].tolist(), int(segment[start])
            text = self._decoder.text(ids)
            flags = bool(learnt[start]), bool(special[start])
            yield Span(ids, text, *flags, here, opens_segment=here != before)
            before = here


class Decoder:
    """Ids to text."""

    def __init__(self, facts: TokenizerFacts, stop_ids: Iterable[int] = ()) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(facts.backend)
        self.special = set(facts.special.values())
        self.ends = {facts.eos_id, *stop_ids}
        self._size = facts.size

    def text(self, ids: list[int]) -> str:
        """Return the text of some ids; an id beyond the vocabulary shows as a number."""
        if all(0 <= one < self._size for one in ids):
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))
        return "".join(f"<{one}?>" for one in ids)


class Shown(NamedTuple):
    """Data that can be shown, sample by sample."""

    data: Any
    decoder: Decoder

    def size(self) -> int:
        """The number of samples."""
        return len(self.data)

    def samples(self, number: int) -> Iterator[ShownSample]:
        """Yield the sequences of one sample: one, or the chosen and the rejected."""
        row = self.data[number]
        if not isinstance(row, dict):
            ids = np.asarray(row).astype(np.int64)
            yield ShownSample("", ids, ids, np.ones(len(ids), np.int32), self.decoder)
            return
        for side in ("chosen_", "rejected_") if "chosen_labels" in row else ("",):
            ids = row[f"{side}input_ids"]
            labels = row.get(f"{side}labels", np.full(len(ids), IGNORED))
            mask = row.get(f"{side}attention_mask", np.ones(len(ids), np.int32))
            name = f" ({side.removesuffix('_')})" if side else ""
            yield ShownSample(name, ids, labels, mask, self.decoder)


def open_shown(prefix: str, tokenizer: str = "", cache_dir: str = "") -> Shown:
    """Open samples or documents by their prefix; the tokenizer is that of preprocessing."""
    bare = next((prefix.removesuffix(e) for e in ENDINGS if prefix.endswith(e)), prefix)
    data: Any
    if Path(f"{bare}.idx").is_file():
        data, facts_prefix = IndexedTokens(bare), bare.rpartition("_")[0].rpartition("_")[0]
    elif Path(f"{bare}_text_document.idx").is_file():
        data, facts_prefix = IndexedTokens(f"{bare}_text_document"), bare
    else:
        data, facts_prefix = InstructionData(bare), bare
    noted = _notes(facts_prefix)
    path = tokenizer or noted.get("tokenizer", "")
    if not path:
        raise ConfigError(
            f"{facts_prefix}.summary.json does not say which tokenizer it was: "
            "give --tokenizer-name-or-path"
        )
    facts = load_facts(path, cache_dir=cache_dir)
    return Shown(data, Decoder(facts, noted.get("stop_ids", ())))


def _notes(prefix: str) -> dict[str, Any]:
    """Return the tokenizer and the stop tokens that preprocessing noted, {} if it did not."""
    try:
        noted = parse_json(Path(f"{prefix}.summary.json").read_bytes())
        stop_ids = [int(token) for token in noted.get("stop_ids", ())]
        return {"tokenizer": str(noted["tokenizer"]), "stop_ids": stop_ids}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return {}
