"""Encoding in bulk: the ids of transformers, with and without the accelerator."""

import functools
import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_llm.data.encoder import (
    KNOWN_SPLITS,
    PROBE_TEXTS,
    Accelerator,
    TextEncoder,
    is_supported,
)
from mindspeed_llm.data.tokenizer import facts_of
from tests.small_tokenizers import TEXT, byte_level, metaspace

TOKENIZERS = {
    "bytes": byte_level(),
    **{scheme: metaspace(scheme) for scheme in ("first", "always", "prepend")},
}
texts = st.lists(st.text(max_size=40) | st.sampled_from([TEXT, "a<|im_start|>b</s>"]), max_size=6)


@pytest.mark.parametrize("parse", [True, False])
@pytest.mark.parametrize("kind", TOKENIZERS)
@given(texts=texts)
def test_ids_are_those_of_transformers(kind, parse, texts):
    tokenizer = TOKENIZERS[kind]
    encoder = TextEncoder(facts_of(tokenizer), parse_special=parse, accelerate=False)
    expected = [
        tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not parse)
        for text in texts
    ]
    assert [ids.tolist() for ids in encoder.encode(texts)] == expected


@pytest.mark.parametrize("kind", ["first", "always", "prepend"])
def test_a_continued_text_gets_no_prefix_space(kind):
    facts = facts_of(TOKENIZERS[kind])
    encoder = TextEncoder(facts, parse_special=False)
    assert facts.has_prefix
    assert facts.prefixes_sections == (kind != "first")
    whole, first, rest = "The quick brown fox", "The quick", " brown fox"
    together = np.concatenate([encoder.encode([first])[0], encoder.encode([rest], True)[0]])
    assert together.tolist() == encoder.encode([whole])[0].tolist()
    assert not facts_of(byte_level()).has_prefix


def test_characters_newer_than_this_unicode_table():
    fast = Accelerator.load(facts_of(byte_level()), parse_special=False)
    assert fast.supports("plain") and fast.supports("".join(PROBE_TEXTS))
    assert not fast.supports("a \U0003fffd"), "a code point without a character"
    assert not fast.supports("\u0378")


def changed(**changes):
    """The facts of the small tokenizer with another pre-tokenizer or without some bytes."""
    facts = facts_of(byte_level())
    content = json.loads(facts.backend)
    content |= {key: value for key, value in changes.items() if key != "without"}
    for letter in changes.get("without", ""):
        content["model"]["vocab"][f"unused {letter}"] = content["model"]["vocab"].pop(letter)
    return replace(facts, backend=json.dumps(content))


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES],
}
SPLIT = {"type": "Split", "pattern": {"Regex": KNOWN_SPLITS[0]}, "behavior": "Isolated",
         "invert": False}  # fmt: skip
NO_BYTES = "\u0104\u0106\u0113\u00f1\u00f2"  # stand for 0x04, 0x06, 0x13, 0xf1, 0xf2, as in SmolLM2
ACCELERATED = {
    "bytes": {},
    "SmolLM2": {"pre_tokenizer": DIGITS, "without": NO_BYTES},
    "no bytes": {"without": NO_BYTES},
    "Qwen": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        SPLIT, {**BYTES, "use_regex": False}]}},
}  # fmt: skip


@pytest.mark.parametrize("parse", [True, False])
@pytest.mark.parametrize("kind", ACCELERATED)
@given(texts=texts | st.lists(st.text("ab 1 90\n'.\x04\u00bd\u0663\U00053333", max_size=12)))
def test_the_accelerator_gives_the_same_ids(kind, parse, texts):
    fast, slow = encoders(kind, parse)
    assert (fast.engine, slow.engine) == ("gigatoken", "tokenizers")
    assert is_supported(fast.facts)
    samples = [*texts, *PROBE_TEXTS, TEXT, "\U0003fffd \u0378", "x<|im_end|>y", ""]
    for right, found in zip(slow.encode(samples), fast.encode(samples)):
        assert right.tolist() == found.tolist()


@functools.cache
def encoders(kind, parse):
    facts = changed(**ACCELERATED[kind])
    return [TextEncoder(facts, parse_special=parse, accelerate=one) for one in (True, False)]


def test_the_accelerator_is_recommended_only_where_supported(caplog):
    for scheme in ("first", "prepend"):
        assert not is_supported(facts_of(metaspace(scheme)))
    odd = {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, BYTES]}
    facts = changed(pre_tokenizer=odd)
    assert not is_supported(facts)
    with caplog.at_level(logging.INFO):
        assert TextEncoder(facts, parse_special=False).engine == "tokenizers"
    records = [record for record in caplog.records if record.name.endswith("encoder")]
    assert [record.levelname for record in records] == ["INFO"]
    assert "gigatoken does not support this tokenizer" in records[0].getMessage()


def test_an_accelerator_that_differs_is_disabled(caplog):
    encoder = TextEncoder(facts_of(byte_level()), parse_special=False)

    class Wrong:
        def encode(self, text):
            return np.array([1], np.uint32)

        def supports(self, text):
            return True

    encoder._fast = Wrong()
    with caplog.at_level(logging.WARNING):
        encoder.check(["something else"])
    assert encoder.engine == "tokenizers" and "gigatoken is not used" in caplog.text
    assert encoder.encode([TEXT])[0].tolist() == byte_level().encode(TEXT)


def test_padding_and_truncation_in_the_file_are_ignored():
    tokenizer = byte_level()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    facts = facts_of(tokenizer)
    object.__setattr__(facts, "backend", json.dumps(content))
    encoder = TextEncoder(facts, parse_special=False, accelerate=False)
    assert encoder.encode([TEXT])[0].tolist() == tokenizer.encode(TEXT)
