"""Wrong flags of preprocess: each produces a one-line error, and nothing is written."""

import json

import pytest

from mindspeed_llm.data.tokenizer import load_facts
from tests.llm.mutants import run
from tests.small_tokenizers import byte_level


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A folder with a tokenizer, whose facts are already cached, and data."""
    folder = tmp_path_factory.mktemp("bad")
    byte_level().save_pretrained(folder / "tokenizer")
    records = [{"prompt": f"question {n}", "response": f"answer {n}"} for n in range(12)]
    (folder / "good.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    load_facts(str(folder / "tokenizer"), cache_dir=str(folder / "cache"))  # slow, once
    return folder


def preprocess(folder, name, *flags):
    return run(
        *("preprocess", "--input", folder / "good.jsonl", "--output-prefix", folder / name),
        *("--tokenizer-name-or-path", folder / "tokenizer", "--cache-dir", folder / "cache"),
        *("--handler-name", "AlpacaStyleInstructionHandler", "--prompt-type", "qwen"),
        *flags,
    )


FLAGS = [
    ["--handler-name", "X"], ["--handler-name", ""], ["--prompt-type", "q"], ["--prompt-type", ""],
    ["--prompt-type", "tokenizer"], ["--prompt-type-path", "/nowhere"], ["--seq-length", "-3"],
    ["--seq-length", "x"], ["--seq-length", "1.5"], ["--pack"], ["--neat-pack"], ["--workers", "0"],
    ["--workers", "two"], ["--n-subs", "0"], ["--n-subs", "-1"], ["--map-keys", "{"],
    ["--map-keys", '{"a": "b"}'], ["--map-keys", '{"prompt": []}'], ["--map-keys", "null"],
    ["--map-keys", '{"prompt": "nope"}'], ["--map-keys", "[" * 100_000], ["--input", "/nowhere"],
    ["--input", ""], ["--input", "/"], ["--output-prefix", ""], ["--output-prefix", "/"],
    ["--output-prefix", "/proc/x"], ["--tokenizer-name-or-path", "/nowhere"],
    ["--tokenizer-type", "GPT2BPETokenizer"], ["--too-long", "auto"], ["--special-tokens", "no"],
    ["--on-bad-line", "ignore"], ["--enable-thinking", "maybe"], ["--enable-thinking", "true"],
    ["--json-keys"], ["--placeholder-token"], ["--config", "/nowhere.yaml"], ["--unknown"],
    ["--hander-name", "X"], ["--seq-length", "2"], ["--merge-group-keys", "x"], ["extra"],
    ["--handler-name", "AlpacaStyleProcessRewardHandler"], ["--log-interval", "0"],
    ["--handler-name", "AlpacaStylePairwiseHandler"], ["--handler-name", "GeneralPretrainHandler"],
    ["--handler-name", "SharegptStyleInstructionHandler"], ["--prompt-type", "\udcff"],
]  # fmt: skip


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: flags[0])
def test_wrong_flags(workdir, flags):
    end = preprocess(workdir, "flags", *flags)
    assert end.code == 2 and end.out == ""
    assert not list(workdir.glob("flags*"))
