"""A tokenizer over numbers written as text, for mock data."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence


class _NullTokenizer:
    """Token ids are the numbers themselves; the id after the last one ends a document."""

    def __init__(self, vocab_size: int) -> None:
        self._words = int(vocab_size)
        # Megatron's datasets hash these to name their index caches.
        self.unique_identifiers: OrderedDict[str, object] = OrderedDict(
            {"class": type(self).__name__, "tokenizer_path": [None], "vocab_size": str(vocab_size)}
        )
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)

    @property
    def vocab_size(self) -> int:
        """Count the words and the end-of-document token."""
        return self._words + 1

    @property
    def eod(self) -> int:
        """Return the end-of-document token."""
        return self._words

    @property
    def pad(self) -> int:
        """Return -1: there is no padding token."""
        return -1

    def tokenize(self, text: str) -> list[int]:
        """Read numbers separated by blanks."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Write the ids separated by blanks."""
        return " ".join(map(str, ids))
