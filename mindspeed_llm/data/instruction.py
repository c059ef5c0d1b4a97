"""Preprocessed samples for training: by prefix, mixed by weight, at any position.

stream = open_stream(["0.7", "out/a", "0.3", "out/b"], seed=1234)
for samples in MicroBatches(stream, size=2, rank=0, world=1, consumed=0): ...
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed.config import ConfigError, nearest, parse_json
from mindspeed_llm.data.indexed import (
    IGNORE_INDEX,
    Array,
    IndexedTokens,
    TokenFile,
    describe_folder,
)
from mindspeed_llm.data.stream import MicroBatches, Sample, SampleStream, take_part

KINDS = {
    "kto": ("input_ids", "attention_mask", "labels", "desirable"),
    "instruction": ("input_ids", "attention_mask", "labels"),
    "pairwise": (
        "chosen_input_ids",
        "chosen_labels",
        "rejected_input_ids",
        "rejected_labels",
    ),
    "prompts": ("input_ids", "attention_mask"),
}
"""The kinds of data and their files; a prefix is of the first kind whose files all exist."""

FIELDS = "fields"
"""Key of what records of prompts have beside the prompt, as bytes; data may lack it."""

PROBES, PROBE_BYTES = 64, 4096
"""Probes of the tokens that a fingerprint includes, and the size of each."""

__all__ = [
    "KINDS",
    "InstructionData",
    "MicroBatches",
    "Sample",
    "SampleStream",
    "open_stream",
    "split_parts",
    "split_weights",
]


class InstructionData(Sequence[Sample]):
    """The samples behind one prefix: `{prefix}_packed_{key}_document.bin/.idx`.

    Keys are those of KINDS. A sample's `attention_mask` is 1, or counts the samples of a neat row.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self.kind = self._find_kind()
        keys = KINDS[self.kind]
        if self.kind == "prompts" and Path(f"{self._name(FIELDS)}.idx").is_file():
            keys = (*keys, FIELDS)
        self._files = {key: IndexedTokens(self._name(key)) for key in keys}
        self._check_lengths()
        self.facts = self._read_facts()
        """The metadata of preprocessing: seq_length, pack, pad_id, tokenizer, ...; or {}."""

    def __len__(self) -> int:
        return len(next(iter(self._files.values())))

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return {key: tokens[index] for key, tokens in self._files.items()}

    @property
    def longest(self) -> int:
        """The length of the longest sample."""
        files = (tokens for key, tokens in self._files.items() if key != FIELDS)
        return max(int(tokens.lengths.max(initial=0)) for tokens in files)

    @property
    def token_files(self) -> list[TokenFile]:
        """The files that hold tokens, as ids or as labels."""
        return [
            TokenFile(Path(f"{self._name(key)}.bin"), file.dtype, key.endswith("labels"))
            for key, file in self._files.items()
            if key.endswith(("input_ids", "labels"))
        ]

    def label_values(self) -> list[int]:
        """Return the labels that occur."""
        return self._files["labels"].distinct_values(without=IGNORE_INDEX)

    def desirabilities(self) -> set[bool]:
        """Return which of desirable and undesirable completions occur."""
        return set(map(bool, self._files["desirable"].distinct_values()))

    @property
    def is_packed(self) -> bool:
        """Whether a sample is a row of several samples."""
        return self.facts.get("pack") is not None

    @property
    def works(self) -> Array:
        """The attention of each sample, up to a factor: the squares of its documents' lengths."""
        if "attention_mask" not in self._files or not self.is_neat:
            lengths = [tokens.lengths.astype(np.float64) for tokens in self._files.values()]
            return np.max(lengths, axis=0) ** 2
        rows = self._files["attention_mask"]
        counts = (np.bincount(mask)[1:].astype(np.float64) for mask in rows)
        return np.fromiter(((count**2).sum() for count in counts), np.float64, len(rows))

    @property
    def is_neat(self) -> bool:
        """Whether a row holds several samples; its mask numbers them, from 1 on."""
        if self.facts:
            return bool(self.facts.get("pack") == "neat")
        return len(self) > 0 and bool(self[0]["attention_mask"].max() > 1)

    def check_length(self, seq_length: int, flag: str = "--seq-length") -> None:
        """Refuse a sequence length that would truncate samples."""
        if self.longest > seq_length:
            lengths = next(iter(self._files.values())).lengths
            count = int((lengths > seq_length).sum())
            raise ConfigError(
                f"{self.prefix}: {count} of {len(self)} samples are longer than {flag} "
                f"{seq_length} (longest: {self.longest}): train with a longer one, or preprocess "
                f"again with --seq-length {seq_length}"
            )

    @property
    def fingerprint(self) -> str:
        """A digest of this data: of all lengths and of probes of the tokens."""
        digest = hashlib.sha256()
        for key, tokens in self._files.items():
            path = Path(f"{self._name(key)}.bin")
            size = path.stat().st_size
            digest.update(f"{key} {tokens.dtype} {size}".encode())
            digest.update(tokens.lengths.tobytes())
            with path.open("rb") as file:
                for position in range(0, size, max(PROBE_BYTES, size // PROBES)):
                    file.seek(position)
                    digest.update(file.read(PROBE_BYTES))
        return digest.hexdigest()[:16]

    def _name(self, key: str) -> str:
        return f"{self.prefix}_packed_{key}_document"

    def _find_kind(self) -> str:
        for kind, keys in KINDS.items():
            if all(Path(f"{self._name(key)}.idx").is_file() for key in keys):
                return kind
        raise ConfigError(self._not_found())

    def _not_found(self) -> str:
        expected = f"expected files such as {self._name('input_ids')}.idx"
        if Path(self.prefix).is_dir():
            return describe_folder(Path(self.prefix), _prefixes(Path(self.prefix)))
        for ending in (".idx", ".bin", "_document", "_packed"):
            if self.prefix.endswith(ending):
                return (
                    f"{self.prefix}: give exactly the --output-prefix of preprocessing; {expected}"
                )
        if missing := self._missing_of_closest_kind():
            return f"{missing} is missing: preprocess again, or copy all files of {self.prefix}"
        if Path(f"{self.prefix}_text_document.idx").is_file():
            return f"{self.prefix} holds plain documents, not samples; {expected}"
        path = Path(self.prefix)
        if near := nearest(path.name, _prefixes(path.parent)):
            expected = f"did you mean {path.with_name(near)}?"
        return f"{self.prefix}: no preprocessed data has that prefix; {expected}"

    def missing(self, kind: str) -> list[str]:
        """Return the index files of a kind of data that this prefix lacks."""
        names = [f"{self._name(key)}.idx" for key in KINDS[kind]]
        return [name for name in names if not Path(name).is_file()]

    def _missing_of_closest_kind(self) -> str | None:
        """Return the first missing file of the kind that is closest to complete, if any."""
        missing = {kind: self.missing(kind) for kind in KINDS}
        parts = [names for kind, names in missing.items() if len(names) < len(KINDS[kind])]
        return min(parts, key=len)[0] if parts else None

    def _check_lengths(self) -> None:
        pairs = [(f"{one}_input_ids", f"{one}_labels") for one in ("chosen", "rejected")]
        groups: list[tuple[str, ...]] = [("input_ids", "attention_mask", "labels"), *pairs]
        for group in groups:
            files = [self._files[key] for key in group if key in self._files]
            if any(not np.array_equal(files[0].lengths, file.lengths) for file in files[1:]):
                raise ConfigError(
                    f"{self.prefix}: {' and '.join(group)} do not match: they are from "
                    "different runs; preprocess again"
                )
        if len({len(file) for file in self._files.values()}) > 1:
            raise ConfigError(f"{self.prefix}: its files hold different numbers of samples")

    def _read_facts(self) -> dict[str, Any]:
        try:
            facts = parse_json(Path(f"{self.prefix}.summary.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}


class Numbered(Sequence[Sample]):
    """Samples with their numbers, counted from `start`."""

    def __init__(self, data: Sequence[Sample], start: int) -> None:
        self._data, self._start = data, start

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return {**self._data[index], "number": np.array(self._start + index)}


def _prefixes(folder: Path) -> list[str]:
    """Return the names of preprocessed data in a folder."""
    endings = {f"_packed_{keys[0]}_document.idx" for keys in KINDS.values()}
    return [path.name.removesuffix(e) for e in endings for path in folder.glob(f"*{e}")]


def open_stream(
    data_path: Sequence[str],
    *,
    seed: int = 1234,
    shuffle: bool = True,
    part: tuple[float, float] = (0.0, 1.0),
    epoch_multiple: int = 1,
    seq_length: int | None = None,
    balanced_step: int | None = None,
    is_numbered: bool = False,
) -> SampleStream:
    """Open the data of `--data-path`: prefixes, all with or all without a weight before them.

    `part` is the share of every data set to take, from and to (see `split_parts`). With
    `seq_length`, data with longer samples is refused. `balanced_step` is the number of samples of a
    step whose ranks get about equal attention, None for any order. With `is_numbered` samples have
    a "number", counted over all data sets.
    """
    weights, prefixes = split_weights(data_path)
    data = [InstructionData(prefix) for prefix in prefixes]
    if seq_length is not None:
        for one in data:
            one.check_length(seq_length)
    kinds = {one.kind for one in data}
    if len(kinds) > 1:
        raise ConfigError(f"--data-path mixes {' and '.join(sorted(kinds))} data")
    starts = accumulate([len(one) for one in data], initial=0)
    whole = [Numbered(one, start) if is_numbered else one for one, start in zip(data, starts)]
    views = [take_part(one, part, prefix) for one, prefix in zip(whole, prefixes)]
    fingerprint = "-".join(one.fingerprint for one in data)
    return SampleStream(
        views,
        weights,
        seed=seed,
        shuffle=shuffle,
        epoch_multiple=epoch_multiple,
        balanced_step=balanced_step,
        fingerprint=fingerprint,
    )


def split_weights(data_path: Sequence[str]) -> tuple[list[Fraction], list[str]]:
    """Parse "0.7 a 0.3 b", or prefixes only (without weights data is mixed by size)."""
    values = list(data_path)
    if not values:
        raise ConfigError("--data-path is missing: give the --output-prefix of preprocessing")
    if len(values) == 1 or _weight(values[0]) is None:
        return [], values
    weights = [_weight(value) for value in values[::2]]
    given = [weight for weight in weights if weight is not None and weight > 0]
    if len(values) % 2 or len(given) < len(weights):
        raise ConfigError(
            f"--data-path {' '.join(values)}: give a weight above 0 before every prefix, or "
            "no weights"
        )
    return given, values[1::2]


def split_parts(split: str) -> list[tuple[float, float]]:
    """Parse `--split 98,2,0`: the shares of training, evaluation and test, from and to."""
    try:
        sizes = [float(value) for value in split.split(",")]
    except ValueError:
        sizes = []
    sizes += [0.0] * (3 - len(sizes))
    if len(sizes) != 3 or min(sizes) < 0 or sum(sizes) <= 0:
        raise ConfigError(f"--split {split}: give three numbers with commas, such as 98,2,0")
    ends = [sum(sizes[: position + 1]) / sum(sizes) for position in range(3)]
    return list(zip([0.0, *ends[:2]], ends))


def _weight(value: str) -> Fraction | None:
    try:
        return Fraction(value)
    except (ValueError, ZeroDivisionError):
        return None
