"""The commands as one types them: the document's own, on data like the document's own."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from tests import forked
from tests.small_tokenizers import byte_level

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples/preprocess/chat_template_inside.jsonl"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    byte_level().save_pretrained(folder / "tokenizer")
    return folder


def python(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)


def forked_command(*words):
    """Run `mindspeed-llm ...` in a fork of this process, which has imported torch already."""
    words = ["mindspeed-llm", *map(str, words)]
    return forked.run(forked.command, words, seconds=240, memory=None)


def the_documents_command(workdir, *more):
    return python("./preprocess_data.py", *the_documents_flags(workdir), *more)


def the_documents_flags(workdir):
    return (
        *("--input", DATA),
        *("--tokenizer-name-or-path", workdir / "tokenizer"),
        *("--output-prefix", workdir / "dataset"),
        *("--workers", "64", "--n-subs", "1", "--log-interval", "100"),
        *("--tokenizer-type", "PretrainedFromHF"),
        *("--handler-name", "AlpacaStyleInstructionHandler", "--prompt-type", "empty"),
        *("--seq-length", "65536", "--cache-dir", workdir / "tmp"),
        *("--map-keys", '{"prompt":"prompt", "query":"", "response":"response"}'),
    )


def read(workdir, key):
    data = IndexedDataset(str(workdir / f"dataset_packed_{key}_document"))
    return [data[number].tolist() for number in range(len(data))]


def test_the_documents_command(workdir):
    done = the_documents_command(workdir)
    assert done.returncode == 0, done.stderr
    assert "records    3 in = 3 written + 0 skipped" in done.stdout
    assert "ended      3 of 3 with an end-of-text token" in done.stdout
    assert "will not be trained to stop" in done.stderr
    tokenizer = byte_level()
    records = [json.loads(line) for line in DATA.read_text().splitlines()]
    for record, ids, labels, mask in zip(
        records, *(read(workdir, key) for key in ("input_ids", "labels", "attention_mask"))
    ):
        prompt = tokenizer.encode(record["prompt"], add_special_tokens=False)
        answer = tokenizer.encode(record["response"], add_special_tokens=False)
        assert ids == prompt + answer
        assert labels == [-100] * len(prompt) + answer
        assert mask == [1] * len(ids)


def test_the_documents_packing(workdir):
    done = the_documents_command(workdir, "--seq-length", "600", "--pack", "--neat-pack")
    assert done.returncode == 0, done.stderr
    assert re.search(r"packed     \d rows", done.stdout)
    masks = read(workdir, "attention_mask")
    assert sum(max(mask) for mask in masks) == 3
    assert all(len(mask) == 600 for mask in masks)


def test_show_batch(workdir):
    pack = ("--seq-length", "600", "--pack", "--neat-pack")
    assert forked_command("preprocess", *the_documents_flags(workdir), *pack).code == 0
    command = ["show-batch", workdir / "dataset", "--cache-dir", workdir / "tmp"]
    shown = python("-m", "mindspeed_llm", *command, "--count", "9")
    assert shown.returncode == 0, shown.stderr
    for line in DATA.read_text().splitlines():
        record = json.loads(line)
        assert record["response"].removesuffix("<|im_end|>") in shown.stdout
        assert "[[" + record["response"][:20] in shown.stdout
    assert "samples packed" in shown.stdout and "packed sample 2" in shown.stdout
    coloured = forked_command(*command, "--count", "1", "--color", "always", "--seq-length", "100")
    assert "\x1b[32m" in coloured.out, "what is trained is green"
    assert "\x1b[9;31m" in coloured.out, "what would be cut is red"
    assert "cut at 100" in coloured.out
    tokens = forked_command(*command, "--count", "1", "--tokens").out
    assert re.search(r"<\|im_end\|>' +label \d+", tokens)
    missing = forked_command("show-batch", workdir / "nothing")
    assert missing.code == 2 and "expected files such as" in missing.error


def test_a_yaml_file_equals_the_flags(workdir):
    done = forked_command("preprocess", *the_documents_flags(workdir))
    expected = done.out.splitlines()[:3]
    options = {
        "input": str(DATA),
        "tokenizer_name_or_path": str(workdir / "tokenizer"),
        "output_prefix": str(workdir / "yaml"),
        "handler_name": "AlpacaStyleInstructionHandler",
        "prompt_type": "qwen",
        "seq_length": 65536,
        "cache_dir": str(workdir / "tmp"),
    }
    (workdir / "run.yaml").write_text(
        "".join(f"{key}: {value}\n" for key, value in options.items())
    )
    command = ["preprocess", "--config", workdir / "run.yaml"]
    flags_win = forked_command(*command, "--prompt-type", "empty")
    assert len(expected) == 3 and flags_win.out.splitlines()[:3] == expected, flags_win.err


def test_merging(workdir):
    (workdir / "parts").mkdir()
    for number in (1, 2):
        done = forked_command(
            *("preprocess", "--input", DATA, "--json-keys", "response"),
            *("--tokenizer-name-or-path", workdir / "tokenizer", "--cache-dir", workdir / "tmp"),
            *("--output-prefix", workdir / "parts" / f"p{number}"),
        )
        assert done.code == 0, done.err
    merge = ["--input", workdir / "parts", "--merge-group-keys"]
    merged = ("response_document", "--output-prefix", workdir / "all")
    done = python("preprocess_data.py", *merge, *merged)
    assert "2 pairs joined" in done.stdout, done.stderr
    joined = IndexedDataset(str(workdir / "all_response_document"))
    single = IndexedDataset(str(workdir / "parts" / "p1_response_document"))
    tokens = [single[number].tolist() for number in range(3)]
    assert [joined[number].tolist() for number in range(len(joined))] == tokens * 2
    assert joined.document_indices.tolist() == list(range(7))
    wrong = forked_command("preprocess", *merge, "nope", "--output-prefix", workdir / "all")
    assert wrong.code == 2 and "no pair in" in wrong.error


def test_help_is_instant_and_complete():
    done = python("preprocess_data.py", "--help")
    assert done.returncode == 0
    document = (
        "--input --tokenizer-name-or-path --output-prefix --workers --n-subs --log-interval "
        "--tokenizer-type --handler-name --prompt-type --seq-length --cache-dir --map-keys --pack "
        "--neat-pack"
    )
    assert all(flag in done.stdout for flag in document.split())
    code = "import sys, mindspeed_llm.cli.preprocess as p; print(sorted(sys.modules))"
    loaded = python("-c", code).stdout
    assert not any(f"'{name}'" in loaded for name in ("torch", "transformers", "pyarrow", "numpy"))
