"""Facts of a tokenizer: complete, cached until its files change, and errors in one line."""

import json
import sys

import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.data.tokenizer import facts_of, load_facts
from tests.small_tokenizers import byte_level


def test_facts_are_read_from_the_folder_and_cached(tmp_path, monkeypatch):
    folder, cache = tmp_path / "tokenizer", str(tmp_path / "cache")
    tokenizer = byte_level("<|im_end|>", "<s>", "{{ messages }}")
    tokenizer.save_pretrained(folder)
    found = load_facts(str(folder), cache_dir="/proc/nowhere")  # works without a memory too
    assert load_facts(str(folder), cache_dir=cache) == found
    assert found == facts_of(tokenizer, str(folder))
    assert found.eos_id == tokenizer.eos_token_id and found.pad_id == tokenizer.pad_token_id
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")  # nothing is loaded a second time
        assert load_facts(str(folder), cache_dir=cache) == found

    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "</s>"}))
    for path in (tmp_path / "cache" / "tokenizers").iterdir():
        path.write_text("{")  # a damaged cache entry is not used
    changed = load_facts(str(folder), cache_dir=cache)
    assert changed.eos == "</s>" and changed.fingerprint != found.fingerprint


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "does not exist: give a folder"),
        ({}, "holds no tokenizer"),
        (
            {"config.json": "{}", "tokenizer_config.json": "{}"},
            r"holds no tokenizer \(no tokenizer.json, .*tekken.json\): give a folder",
        ),
        ({"tokenizer.json": "{"}, "cannot be loaded by transformers"),
    ],
)
def test_a_folder_that_holds_no_tokenizer(tmp_path, content, message):
    folder = tmp_path / "t"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_facts(str(folder), cache_dir=str(tmp_path / "cache"))
    assert "\n" not in str(error.value)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match="is a file: give a folder"):
        load_facts(str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="is missing"):
        load_facts("")


@pytest.mark.parametrize(
    ("path", "message"), [("x" * 5000, "File name too long"), ("a\0b", "null byte")]
)
def test_invalid_paths_are_one_line_errors(path, message):
    with pytest.raises(ConfigError, match=message):
        load_facts(path)
