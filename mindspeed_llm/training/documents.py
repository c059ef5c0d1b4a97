"""Plain documents as samples of one length: windows over the tokens, one after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed.config import ConfigError, parse_json
from mindspeed_llm.data.indexed import (
    IGNORE_INDEX,
    Array,
    IndexedTokens,
    TokenFile,
    describe_folder,
)
from mindspeed_llm.data.instruction import split_weights
from mindspeed_llm.data.stream import Sample, SampleStream, take_part

SUFFIXES = ("", "_text_document")
PROBES = 16
"""Documents whose last token is looked at."""


class DocumentWindows(Sequence[Sample]):
    """Windows of `length` tokens; labels are the tokens that follow, so windows overlap by one.

    Windows that separate documents have an `attention_mask` which numbers the documents from 1 on;
    the last token of a document has no label, as it cannot see what the next is about.
    """

    def __init__(self, prefix: str, length: int, *, separate: bool = False) -> None:
        self._name = _find(prefix)
        index = IndexedTokens(self._name)
        self._length = length
        self._ends = document_ends(index) if separate else None
        # numpy maps no empty file.
        is_empty = len(index) == 0 or not index.lengths.any()
        self._tokens: Any = (
            np.zeros(0, index.dtype)
            if is_empty
            else np.memmap(f"{self._name}.bin", index.dtype, "r")
        )
        if len(self) < 1:
            raise ConfigError(
                f"{prefix}: its {len(self._tokens)} tokens are fewer than the {length + 1} of one "
                "sample: lower --seq-length"
            )

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        start = index * self._length
        window = self._tokens[start : start + self._length + 1].astype(np.int64)
        sample = {"input_ids": window[:-1], "labels": window[1:]}
        return sample if self._ends is None else sample | self._separated(start, window[1:])

    def _separated(self, start: int, labels: Array) -> Sample:
        """Return the numbers of the documents in a window, and its labels within documents."""
        assert self._ends is not None
        first, last = np.searchsorted(self._ends, (start, start + self._length), "right")
        ends = self._ends[first:last] - start
        numbers = np.searchsorted(ends, np.arange(self._length), "right") + 1
        labels = labels.copy()
        labels[ends - 1] = IGNORE_INDEX
        return {"labels": labels, "attention_mask": numbers}

    @property
    def works(self) -> Array:
        """The attention of each window, up to a factor: the squares of its documents' lengths."""
        starts = np.arange(len(self) + 1) * self._length
        inner = np.zeros(0, np.int64) if self._ends is None else self._ends
        cuts = np.union1d(starts, inner[inner < starts[-1]])
        windows = cuts[:-1] // self._length
        return np.bincount(windows, np.diff(cuts).astype(np.float64) ** 2, len(self))

    @property
    def fingerprint(self) -> str:
        """A name for this data and this length."""
        content = f"{self._length} {len(self._tokens)}".encode()
        content += Path(f"{self._name}.idx").read_bytes()[: 1 << 20]
        return hashlib.sha256(content + self._tokens[:4096].tobytes()).hexdigest()[:16]


def open_documents(
    data_path: Sequence[str],
    length: int,
    *,
    seed: int,
    shuffle: bool,
    part: tuple[float, float],
    epoch_multiple: int = 1,
    separate: bool = False,
    balanced_step: int | None = None,
) -> SampleStream:
    """Open what `--data-path` names: prefixes, each with or all without a weight in front.

    `separate` is whether the documents of a window must not see each other; `balanced_step` is the
    number of windows of a step whose ranks get about equal attention, None for any order.
    """
    weights, prefixes = split_weights(data_path)
    data = [DocumentWindows(prefix, length, separate=separate) for prefix in prefixes]
    return SampleStream(
        [take_part(one, part, prefix) for one, prefix in zip(data, prefixes)],
        weights,
        seed=seed,
        shuffle=shuffle,
        epoch_multiple=epoch_multiple,
        balanced_step=balanced_step,
        fingerprint="-".join(one.fingerprint for one in data),
    )


def document_ends(index: IndexedTokens) -> Array:
    """Return the number of tokens up to the end of each document that has any."""
    upto = np.concatenate(([0], np.cumsum(index.lengths, dtype=np.int64)))
    return np.unique(upto[index.documents[1:]])


def ends_with_stop_token(prefix: str) -> bool:
    """Return whether documents end with an end-of-text token, as far as preprocessing knew one."""
    index, stop_ids = IndexedTokens(_find(prefix)), document_facts(prefix).get("stop_ids")
    lasts = [index[int(number) - 1] for number in index.documents[1 : PROBES + 1]]
    found = [int(tokens[-1]) for tokens in lasts if len(tokens)]
    return not stop_ids or any(token in stop_ids for token in found)


def document_tokens(prefix: str) -> TokenFile:
    """Return the file with the tokens of a prefix."""
    name = _find(prefix)
    return TokenFile(Path(f"{name}.bin"), IndexedTokens(name).dtype)


def document_facts(prefix: str) -> dict[str, Any]:
    """Return the summary that preprocessing wrote for a prefix; empty where there is none."""
    for ending in SUFFIXES:
        path = Path(f"{prefix.removesuffix(ending)}.summary.json")
        try:
            return dict(parse_json(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            continue
    return {}


def _find(prefix: str) -> str:
    names = [prefix + suffix for suffix in SUFFIXES]
    for name in names:
        if Path(f"{name}.idx").is_file():
            return name
    if Path(prefix).is_dir():
        files = (path.stem for path in Path(prefix).glob("*.idx") if "_packed_" not in path.name)
        raise ConfigError(
            describe_folder(Path(prefix), (name.removesuffix("_text_document") for name in files))
        )
    tried = " and ".join(f"{name}.idx" for name in names)
    raise ConfigError(f"{prefix}: there are no token files of that name; looked for {tried}")
