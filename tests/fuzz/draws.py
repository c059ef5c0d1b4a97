"""A case of the fuzzer, and what draws one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.internal.conjecture.data import ConjectureData

from tests.llm.mutants import TOKENS, as_json, changed, damaged

KEPT = {"save_dir", "output_prefix", "cache_dir", "train_iters", "data_path", "max_new_tokens"}
"""Options of a YAML file that stay as they are: they say where to write, or how much to do."""


@dataclass(frozen=True)
class Case:
    """A command, what is added to it, and the files that are written before it."""

    command: str
    more: tuple[str, ...] = ()
    files: dict[str, bytes] = field(default_factory=dict)
    check: str = ""
    """The check of an accepted case, by a name of tests.fuzz.checks."""


class Draw:
    """Draws from strategies; the same number gives the same case."""

    def __init__(self, good: Path, number: str) -> None:
        self._data = ConjectureData(random=Random(number))
        self.good = good

    def __call__(self, strategy: Any) -> Any:
        return self._data.draw(strategy)

    def one(self, choices: Sequence[Any]) -> Any:
        """Choose one."""
        return self(st.sampled_from(list(choices)))

    def read(self, path: str) -> bytes:
        """Return the good content of a file."""
        return (self.good / path).read_bytes()

    def find(self, pattern: str) -> str:
        """Choose one of the files of a pattern."""
        found = sorted(str(path.relative_to(self.good)) for path in self.good.glob(pattern))
        return str(self.one(found))

    def damage(self, path: str, end: int | None = None) -> bytes:
        """Damage the bytes of a file."""
        return bytes(self(damaged(self.read(path), end)))

    def flip(self, path: str) -> bytes:
        """Change one bit of a file."""
        content = bytearray(self.read(path))
        content[self(st.integers(0, len(content) - 1))] ^= 1 << self(st.integers(0, 7))
        return bytes(content)

    def edit(self, path: str) -> bytes:
        """Damage a JSON file, or put odd values into it."""
        if self(st.booleans()):
            return self.damage(path)
        return as_json(self(changed(json.loads(self.read(path)))))

    def edit_yaml(self, path: str) -> bytes:
        """Damage a YAML file, or put odd values into it; what says where to write is kept."""
        values = yaml.safe_load(self.read(path))
        kept = {key: value for key, value in values.items() if key in KEPT}
        other = {key: value for key, value in values.items() if key not in KEPT}
        text = yaml.safe_dump(other).encode()
        if self(st.booleans()):
            text = yaml.safe_dump(self(changed(other))).encode()
        else:
            text = self(damaged(text))
        return yaml.safe_dump(kept).encode() * bool(kept) + text

    def structure(self, path: str) -> bytes:
        """Damage the structure of a safetensors file: its numbers have no guard."""
        good = self.read(path)
        data = 8 + int.from_bytes(good[:8], "little")
        kind = self.one(["header", "header", "values", "values", "size"])
        if kind == "header":
            return bytes(self(damaged(good[:data]))) + good[data:]
        if kind == "size":
            position = self(st.integers(data, len(good) - 1))
            more = self.one([b"", *TOKENS])
            return good[:position] + more + good[position:] if more else good[:position]
        text = as_json(self(changed(json.loads(good[8:data]))))
        return len(text).to_bytes(8, "little") + text + good[data:]
