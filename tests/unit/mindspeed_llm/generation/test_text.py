"""Prompts are encoded, completions decoded piece by piece, and end at stop tokens."""

import functools
import io
import tempfile
from types import SimpleNamespace

import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.cli.chat import talk
from mindspeed_llm.generation.options import GenerateOptions, in_vain
from mindspeed_llm.generation.text import TextCodec, TextStream, read_prompts
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
    return TextCodec(GenerateOptions(**options), tmp_path, interactive=False)


@pytest.mark.parametrize("tokenizer", [byte_level(), metaspace("first")], ids=["bytes", "words"])
def test_pieces_make_the_text(tmp_path, tokenizer):
    made = text(tmp_path, tokenizer)
    tokens = tokenizer(WORDS)["input_ids"]
    stream = TextStream(made)
    pieces = [stream.push(token) for token in tokens]
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces) == made.decode(tokens) == whole
    assert stream.flush() == "" and "你好世界 😀" in stream.text
    assert sum(map(bool, pieces)) > 10, "nothing was shown before the end"
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_character_is_shown_at_the_end(tmp_path):
    tokenizer = byte_level()
    stream = TextStream(text(tmp_path, tokenizer))
    tokens = tokenizer("a😀")["input_ids"][:-1]
    assert "".join(map(stream.push, tokens)) == "a"
    assert stream.flush().startswith("\ufffd") and stream.flush() == ""


def test_stop_ids(tmp_path):
    tokenizer = byte_level()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    made = text(tmp_path, tokenizer, add_eos_token=("<|eot_id|>",), prompt_type="chatml")
    names = ("<|im_end|>", "<|im_start|>", "<|eot_id|>")
    assert made.stop_ids == {7, 9, *tokenizer.convert_tokens_to_ids(list(names))}
    assert made.decode(tokenizer("Hi")["input_ids"] + [tokenizer.eos_token_id]) == "Hi"


def test_an_empty_prompt_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="empty prompt"):
        text(tmp_path, byte_level()).encode("")


@pytest.mark.parametrize("prompt_type", [None, "chatml"])
def test_a_prompt_of_other_bytes_than_text_is_an_error(tmp_path, prompt_type):
    made = text(tmp_path, byte_level(), prompt_type=prompt_type)
    with pytest.raises(ConfigError, match="the prompt is not UTF-8 text"):
        made.encode(b"caf\xe9".decode(errors="surrogateescape"))


def test_a_conversation_goes_on_after_other_bytes_than_text(tmp_path, monkeypatch, capsys):
    def request(*_):
        raise ConfigError("no model here")

    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9\nclear\nq\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", typed)
    codec = text(tmp_path, byte_level(), prompt_type="chatml")
    options = GenerateOptions(load="x", max_new_tokens=1)
    talk(SimpleNamespace(codec=codec, options=options, limit=64, request=request))
    assert "You >> caf\ufffd\n(no model here)\nYou >> clear\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": 5}', "line 2: prompt is a number: it must be text"),
        ('{"text": "x"}', "line 2: has no prompt; it has text"),
        ("{}", "line 2: has no prompt; it has nothing"),
        ("[]", "line 2: holds a list, not an object with the text"),
        ("{", "line 2: is not valid JSON"),
        ("[" * 100_000, "line 2: is not valid JSON"),
    ],
    ids=lambda text: text[:20],
)
def test_wrong_lines_of_a_prompt_file(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        read_prompts(str(path))


@pytest.mark.parametrize(
    ("given", "tasks", "said"),
    [
        ({}, ["greedy"], []),
        ({"temperature": 0.7, "num_beams": 4}, ["greedy"], ["--temperature", "--num-beams"]),
        ({"temperature": 0.0, "seed": 3}, ["greedy"], []),  # the best token, as greedy takes it
        ({"top_k": 5, "top_p": 0.5, "early_stopping": True}, ["do_sample", "beam_search"], []),
        ({"top_k": 5, "length_penalty": 2.0}, ["beam_search_with_sampling"], []),
        ({"history_turns": 1, "top_p": 0.5}, ["beam_search"], ["--top-p", "--history-turns"]),
        ({"system": "Be.", "temperature": 1.0, "history_turns": 1}, ["chat"], []),
        ({"system": "Be.", "enable_thinking": "true"}, ["greedy"], ["--system", "--enable-thin"]),
        ({"system": "Be.", "hf_chat_template": True}, ["greedy"], []),
        ({"system": "Be.", "prompt_type": "qwen"}, ["greedy"], []),
    ],
)
def test_what_no_task_reads_is_said(given, tasks, said):
    lines = list(in_vain(GenerateOptions(load="model", **given), tasks))
    assert len(lines) == len(said)
    for line, flag in zip(lines, said):
        assert line.startswith(flag) and ": no effect " in line
