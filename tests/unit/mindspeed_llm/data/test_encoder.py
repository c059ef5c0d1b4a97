"""Encoding in bulk: the ids of transformers, with and without the accelerator."""

import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_llm.data.encoder import TRICKY, TextEncoder, has_unknown_characters
from mindspeed_llm.data.tokenizer import facts_of
from tests.small_tokenizers import TEXT, byte_level, metaspace

TOKENIZERS = {
    "bytes": byte_level(),
    **{scheme: metaspace(scheme) for scheme in ("first", "always", "prepend")},
}
texts = st.lists(st.text(max_size=40) | st.sampled_from([TEXT, "a<|im_start|>b</s>"]), max_size=6)


@pytest.mark.parametrize("parse", [True, False])
@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=30, deadline=None)
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
def test_a_text_that_goes_on_gets_no_space_in_front(kind):
    facts = facts_of(TOKENIZERS[kind])
    encoder = TextEncoder(facts, parse_special=False)
    assert facts.has_prefix
    assert facts.prefixes_sections == (kind != "first")
    whole, first, rest = "The quick brown fox", "The quick", " brown fox"
    together = np.concatenate([encoder.encode([first])[0], encoder.encode([rest], True)[0]])
    assert together.tolist() == encoder.encode([whole])[0].tolist()
    assert not facts_of(byte_level()).has_prefix


def test_characters_of_the_future():
    assert not has_unknown_characters("plain")
    assert not has_unknown_characters("".join(TRICKY))
    assert has_unknown_characters("a \U0003fffd"), "a code point without a character"
    assert has_unknown_characters("\u0378")


def gigatoken_encoder(**options):
    pytest.importorskip("gigatoken", reason="the optional accelerator is not installed")
    return TextEncoder(facts_of(byte_level()), **options)


@pytest.mark.parametrize("parse", [True, False])
def test_the_accelerator_gives_the_same_ids(parse):
    fast = gigatoken_encoder(parse_special=parse)
    slow = TextEncoder(facts_of(byte_level()), parse_special=parse, accelerate=False)
    assert (fast.engine, slow.engine) == ("gigatoken", "tokenizers")
    samples = [*TRICKY, TEXT, "\U0003fffd \u0378", "x<|im_end|>y", "", *byte_level().get_vocab()]
    for right, found in zip(slow.encode(samples), fast.encode(samples)):
        assert right.tolist() == found.tolist()


def test_an_accelerator_that_differs_is_given_up(caplog):
    encoder = gigatoken_encoder(parse_special=False)

    class Wrong:
        def encode(self, text):
            return np.array([1], np.uint32)

    encoder._fast = Wrong()
    with caplog.at_level(logging.WARNING):
        encoder.check(["something else"])
    assert encoder.engine == "tokenizers" and "gigatoken is not used" in caplog.text
    assert encoder.encode([TEXT])[0].tolist() == byte_level().encode(TEXT)


def test_padding_and_cutting_set_in_the_file_are_ignored():
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
