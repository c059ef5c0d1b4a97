"""show-batch: which tokens each context-parallel rank holds, and samples without an answer."""

import json

import pytest

from mindspeed_llm.cli.main import main
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.preprocess import preprocess
from tests.small_tokenizers import byte_level


@pytest.fixture
def show(tmp_path, capsys):
    """Show one document of 13 tokens with some flags; return the lines."""
    byte_level().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "data.jsonl").write_text('{"text": "0123456789abc"}\n')
    options = PreprocessOptions(
        input=str(tmp_path / "data.jsonl"),
        output_prefix=str(tmp_path / "out"),
        tokenizer_name_or_path=str(tmp_path / "tokenizer"),
        cache_dir=str(tmp_path / "cache"),
        append_eod=True,
    )
    assert preprocess(options).tokens == 13

    def run(*flags):
        capsys.readouterr()
        code = main(
            ["show-batch", str(tmp_path / "out"), "--cache-dir", str(tmp_path / "cache"), *flags]
        )
        output = capsys.readouterr()
        return code, (output.out + output.err).splitlines()

    return run


def test_every_rank_has_a_line(show):
    code, lines = show("--context-parallel-size", "2")
    assert code == 0
    assert "   rank 0: 5 tokens, 3 padding: 0-3 12-12" in lines
    assert "   rank 1: 8 tokens: 4-11" in lines
    assert "   19% of the 16 tokens on these ranks are padding" in lines
    assert not any("rank" in line for line in show()[1])


def test_a_folder_names_what_is_in_it(show, tmp_path, capsys):
    assert main(["show-batch", str(tmp_path)]) == 2
    hint = f"give the prefix of data in it (it holds {tmp_path / 'out'})"
    assert hint in capsys.readouterr().err


def test_every_token_has_its_rank(show):
    code, lines = show("--context-parallel-size", "2", "--tokens")
    tokens = [line for line in lines if "label" in line]
    owners = [line.split("rank ")[1][0] for line in tokens]
    assert code == 0 and "".join(owners) == "0000111111110"


@pytest.mark.parametrize("size", ["0", "-1", "1000000"])
def test_sizes_that_cannot_be_shown(show, size):
    code, lines = show("--context-parallel-size", size)
    assert code == 2 and f"--context-parallel-size {size}: give 1 to 1024" in lines[-1]


@pytest.mark.parametrize(
    "handler, record",
    [
        ("OpenAIPromptHandler", {"prompt": "[Who?]", "answer": "[a] fox"}),
        ("AlpacaStyleProcessRewardHandler", {"input": "1 + 1x It is 2.x", "value": ["+", "+"]}),
    ],
)
def test_samples_without_an_answer_need_no_end(tmp_path, capsys, handler, record):
    """Prompts show what the reward gets with them."""
    byte_level().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    flags = "--prompt-type chatml --placeholder-token x --cache-dir".split()
    where = ["--input", str(tmp_path / "data.jsonl"), "--output-prefix", str(tmp_path / "out")]
    where += ["--tokenizer-name-or-path", str(tmp_path / "tokenizer"), "--handler-name", handler]
    assert main(["preprocess", *where, *flags, str(tmp_path / "cache")]) == 0
    assert "end-of-text" not in capsys.readouterr().out
    assert main(["show-batch", str(tmp_path / "out"), "--cache-dir", str(tmp_path / "cache")]) == 0
    shown = capsys.readouterr().out
    assert "end-of-text" not in shown
    fields = json.dumps({"answer": "[a] fox"})
    assert (f"fields for the reward: {fields}" in shown) == ("answer" in record)
