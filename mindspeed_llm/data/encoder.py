"""Text to token ids, in bulk: Hugging Face tokenizers, or gigatoken where it gives the same ids."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from mindspeed_llm.data.accelerator import Accelerator
from mindspeed_llm.data.indexed import Array
from mindspeed_llm.data.tokenizer import TokenizerFacts, remove_prefix

logger = logging.getLogger(__name__)

TRICKY = (
    "don't DON'T I'll 'S",
    " a  b \n\n c\t\td \r\n e   ",
    "12345 3.14 1e-5 0x1F",
    "x\u00a0\u2003y \u3000 z",
    "\u00e9 e\u0301 \u00df \ufb01 \u0130",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093 \uc548\ub155",
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \u0663 \uff11\uff12",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001d518",
    "a\x00b\x7f\u200b\ufeff",
    "<tag/> </s> <|x|> [INST] {{y}} __init__ != ==> //",
)
"""Texts on which two implementations of one tokenizer would disagree first."""


class TextEncoder:
    """Encodes texts with one tokenizer, with or without reading special tokens in them.

    `continued` is for a text that goes on where another ended: a tokenizer that puts a space in
    front of a text must not do so there.
    """

    def __init__(
        self, facts: TokenizerFacts, *, parse_special: bool, accelerate: bool = True
    ) -> None:
        self.facts = facts
        self._parse_special = parse_special
        self._plain = _variant(facts.backend, parse_special)
        self._fast = Accelerator.load(facts, parse_special) if accelerate else None
        self.check([*TRICKY, *facts.special])
        self._continued = self._plain
        if facts.has_prefix:
            content = orjson.loads(facts.backend)
            remove_prefix(content)
            self._continued = _variant(orjson.dumps(content).decode(), parse_special)

    @property
    def engine(self) -> str:
        """Which implementation encodes."""
        return "tokenizers" if self._fast is None else "gigatoken"

    def encode(self, texts: Sequence[str], continued: bool = False) -> list[Array]:
        """Return the ids of each text."""
        if self._fast is None or (continued and self.facts.has_prefix):
            return _hf_encode(self._continued if continued else self._plain, texts)
        encode, takes, plain = self._fast.encode, self._fast.takes, self._plain
        return [encode(text) if takes(text) else _hf_encode(plain, [text])[0] for text in texts]

    def check(self, samples: Sequence[str]) -> None:
        """Compare the accelerator with the Hugging Face tokenizer; give it up if they differ."""
        if self._fast is None:
            return
        for text, right in zip(samples, _hf_encode(self._plain, samples)):
            if not np.array_equal(self.encode([text])[0], right):
                logger.warning(
                    "gigatoken is not used: it encodes %r unlike the Hugging Face tokenizer",
                    text[:40],
                )
                self._fast = None
                return


def _hf_encode(tokenizer: Any, texts: Sequence[str]) -> list[Array]:
    found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(one.ids, np.uint32) for one in found]


def _variant(backend: str, parse_special: bool) -> Any:
    """Build the Hugging Face tokenizer that never pads, cuts or adds tokens of its own."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(backend)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = not parse_special
    return tokenizer
