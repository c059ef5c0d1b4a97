"""Text to token ids, in bulk: Hugging Face tokenizers, or gigatoken where it gives the same ids."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from mindspeed_llm.data.indexed import Array
from mindspeed_llm.data.tokenizer import TokenizerFacts, remove_prefix

logger = logging.getLogger(__name__)

ASCII = 0x7F
NUM_CODE_POINTS = 0x40000
"""Code points from here on are in no table that this Python could have."""
_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN_SPLITS = (_CASES + r"\p{N}" + _REST, _CASES + r"\p{N}{1,3}" + _REST)
"""The expressions of Qwen's and of Llama 3's tokenizers, which gigatoken is known to support."""


class Accelerator:
    """gigatoken's form of a tokenizer: tens of times faster, for the texts on which it must agree.

    It supports byte-level BPE with all 256 bytes and with the pre-tokenizers that it knows. A
    tokenizer that is close to that is changed so that the ids of most texts stay the same; texts
    on which the change would show are left to Hugging Face's tokenizers.
    """

    def __init__(self, backend: Any, missing: bytes, has_digit_tokens: bool) -> None:
        self.encode = backend.encode
        self._missing = missing
        self._unsafe = _unsafe_code_points(has_digit_tokens)

    @staticmethod
    def load(facts: TokenizerFacts, parse_special: bool) -> Accelerator | None:
        """Load the tokenizer into gigatoken; return None if it is not installed or refuses it."""
        try:
            import gigatoken
        except ImportError:
            return None
        content = orjson.loads(facts.backend)
        if not parse_special:
            added = content["added_tokens"]
            content["added_tokens"] = [token for token in added if not token["special"]]
        has_digit_tokens = _digits_to_added_tokens(content)
        missing = _add_missing_bytes(content, facts.size)
        try:
            backend = gigatoken.Tokenizer.from_json(orjson.dumps(content).decode()).backend
        except Exception as error:  # noqa: BLE001 (anything it rejects is encoded by Hugging Face's)
            reason = str(error).strip().splitlines() or [type(error).__name__]
            logger.info("gigatoken does not support this tokenizer (%s): not used", reason[0])
            return None
        return Accelerator(backend, missing, has_digit_tokens)

    def supports(self, text: str) -> bool:
        """Return whether the ids of a text are sure to be those of the tokenizer."""
        if not text.isascii():
            points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            if self._unsafe[points[points > ASCII]].any():
                return False
        if not self._missing:
            return True
        content = text.encode()
        return len(content.translate(None, self._missing)) == len(content)


def is_installed() -> bool:
    """Return whether gigatoken is installed."""
    return importlib.util.find_spec("gigatoken") is not None


def is_supported(facts: TokenizerFacts) -> bool:
    """Return whether gigatoken is known to support a tokenizer, without loading it."""
    content = orjson.loads(facts.backend)
    if content["model"].get("type") != "BPE" or content.get("normalizer"):
        return False
    _digits_to_added_tokens(content)
    step = content.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers") or [step]
    if [one.get("type") for one in steps] == ["Split", "ByteLevel"]:
        return steps[0]["pattern"].get("Regex") in KNOWN_SPLITS
    return len(steps) == 1 and steps[0].get("type") == "ByteLevel" and steps[0]["use_regex"]


def _digits_to_added_tokens(content: dict[str, Any]) -> bool:
    """Turn a pre-tokenizer step that splits off digits into added tokens."""
    step, vocab = content.get("pre_tokenizer") or {}, content["model"].get("vocab")
    steps = step.get("pretokenizers") or []
    is_known = [one.get("type") for one in steps] == ["Digits", "ByteLevel"]
    if not is_known or not steps[0].get("individual_digits") or not isinstance(vocab, dict):
        return False
    digits = [digit for digit in "0123456789" if digit in vocab]
    if len(digits) < 10:
        return False
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] += [
        {"id": vocab[digit], "content": digit, "special": False, **plain} for digit in digits
    ]
    content["pre_tokenizer"] = steps[1]
    return True


def _add_missing_bytes(content: dict[str, Any], size: int) -> bytes:
    """Give ids beyond the vocabulary to bytes that have none; return these bytes."""
    vocab = content["model"].get("vocab")
    if content["model"].get("type") != "BPE" or not isinstance(vocab, dict):
        return b""
    missing = [byte for byte, char in enumerate(_byte_chars()) if char not in vocab]
    if len(missing) == 256:
        return b""  # not at the level of bytes
    vocab.update((_byte_chars()[byte], size + index) for index, byte in enumerate(missing))
    return bytes(missing)


@functools.cache
def _byte_chars() -> tuple[str, ...]:
    """Return the character that byte-level tokenizers use for each byte: GPT-2's table."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable}
    chars |= {byte: chr(0x100 + index) for index, byte in enumerate(others)}
    return tuple(chars[byte] for byte in range(256))


@functools.cache
def _unsafe_code_points(with_numbers: bool) -> Array:
    """Return, for every code point, whether texts with it need Hugging Face's tokenizers.

    These are characters that this Python's Unicode does not know yet: newer tables may call them
    letters and older ones not. And, where digits are tokens, all numbers that are not ASCII.
    """
    categories = "".join(map(unicodedata.category, map(chr, range(NUM_CODE_POINTS))))
    kinds = np.frombuffer(categories.encode(), "S2")
    unsafe = np.ones(sys.maxunicode + 1, bool)
    unsafe[:NUM_CODE_POINTS] = kinds == b"Cn"
    if with_numbers:
        unsafe[:NUM_CODE_POINTS] |= np.isin(kinds, (b"Nd", b"Nl", b"No"))
    return unsafe


PROBE_TEXTS = (
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
"""Texts on which two implementations of one tokenizer are most likely to differ."""


class TextEncoder:
    """Encodes texts with one tokenizer, with or without parsing special tokens in them.

    `continued` is for a text that continues another: a tokenizer that prepends a space to a text
    must not do so there.
    """

    def __init__(
        self, facts: TokenizerFacts, *, parse_special: bool, accelerate: bool = True
    ) -> None:
        self.facts = facts
        self._parse_special = parse_special
        self._plain = _variant(facts.backend, parse_special)
        self._fast = Accelerator.load(facts, parse_special) if accelerate else None
        self.check([*PROBE_TEXTS, *facts.special])
        self._continued = self._plain
        if facts.has_prefix:
            content = orjson.loads(facts.backend)
            remove_prefix(content)
            self._continued = _variant(orjson.dumps(content).decode(), parse_special)

    @property
    def engine(self) -> str:
        """The implementation in use."""
        return "tokenizers" if self._fast is None else "gigatoken"

    def encode(self, texts: Sequence[str], continued: bool = False) -> list[Array]:
        """Return the ids of each text."""
        if self._fast is None or (continued and self.facts.has_prefix):
            return _hf_encode(self._continued if continued else self._plain, texts)
        encode, supports, plain = self._fast.encode, self._fast.supports, self._plain
        return [encode(text) if supports(text) else _hf_encode(plain, [text])[0] for text in texts]

    def check(self, samples: Sequence[str]) -> None:
        """Compare the accelerator with the Hugging Face tokenizer; disable it if they differ."""
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
    """Build the Hugging Face tokenizer that never pads, truncates or adds tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(backend)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = not parse_special
    return tokenizer
