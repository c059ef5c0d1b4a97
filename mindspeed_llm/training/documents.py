"""Plain documents as samples of one length: windows over the tokens, one after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed.config import ConfigError, parse_json
from mindspeed_llm.data.indexed import IndexedTokens, TokenFile
from mindspeed_llm.data.instruction import split_weights
from mindspeed_llm.data.stream import Part, Sample, SampleStream

SUFFIXES = ("", "_text_document")


class DocumentWindows(Sequence[Sample]):
    """Windows of `length` tokens; labels are the tokens that follow, so windows overlap by one."""

    def __init__(self, prefix: str, length: int) -> None:
        self._name = _find(prefix)
        index = IndexedTokens(self._name)
        self._length = length
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
        return {"input_ids": window[:-1], "labels": window[1:]}

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
) -> SampleStream:
    """Open what `--data-path` names: prefixes, each with or all without a weight in front."""
    weights, prefixes = split_weights(data_path)
    data = [DocumentWindows(prefix, length) for prefix in prefixes]
    return SampleStream(
        [Part(one, *part) for one in data],
        weights,
        seed=seed,
        shuffle=shuffle,
        epoch_multiple=epoch_multiple,
        fingerprint="-".join(one.fingerprint for one in data),
    )


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
    tried = " and ".join(f"{name}.idx" for name in names)
    raise ConfigError(f"{prefix}: there are no token files of that name; looked for {tried}")
