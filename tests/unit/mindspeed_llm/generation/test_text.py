"""Text comes out whole, piece by piece, and ends where it should."""

import functools
import tempfile

import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.generation.options import GenerateOptions
from mindspeed_llm.generation.text import Stream, Text
from tests.small_tokenizers import byte_level, metaspace

WORDS = "Who are you? naïve café 你好世界 😀 def f(x):\n    return x"


@functools.cache
def saved(tokenizer):
    """Save a tokenizer once: reading one takes seconds, and is remembered by its folder."""
    folder = tempfile.mkdtemp()
    tokenizer.save_pretrained(folder)
    return folder


def text(tmp_path, tokenizer, **options):
    options |= {"load": "x", "tokenizer_name_or_path": saved(tokenizer)}
    return Text(GenerateOptions(**options), tmp_path, talks=False)


@pytest.mark.parametrize("tokenizer", [byte_level(), metaspace("first")], ids=["bytes", "words"])
def test_pieces_make_the_whole(tmp_path, tokenizer):
    made = text(tmp_path, tokenizer)
    tokens = tokenizer(WORDS)["input_ids"]
    stream = Stream(made)
    pieces = [stream.feed(token) for token in tokens]
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces) == made.decode(tokens) == whole
    assert stream.rest() == "" and "你好世界 😀" in stream.whole
    assert sum(map(bool, pieces)) > 10, "nothing was shown before the end"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_cut_character_is_shown_at_the_end(tmp_path):
    tokenizer = byte_level()
    stream = Stream(text(tmp_path, tokenizer))
    tokens = tokenizer("a😀")["input_ids"][:-1]
    assert "".join(map(stream.feed, tokens)) == "a"
    assert stream.rest().startswith("\ufffd") and stream.rest() == ""


def test_what_ends_an_answer(tmp_path):
    tokenizer = byte_level()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    made = text(tmp_path, tokenizer, add_eos_token=("<|eot_id|>",), prompt_type="chatml")
    names = ("<|im_end|>", "<|im_start|>", "<|eot_id|>")
    assert made.stops == {7, 9, *tokenizer.convert_tokens_to_ids(list(names))}
    assert made.decode(tokenizer("Hi")["input_ids"] + [tokenizer.eos_token_id]) == "Hi"


def test_no_text_is_no_prompt(tmp_path):
    with pytest.raises(ConfigError, match="empty prompt"):
        text(tmp_path, byte_level()).encode("")
