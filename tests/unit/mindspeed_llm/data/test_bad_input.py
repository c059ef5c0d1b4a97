"""Hundreds of damaged inputs: each ends soon, with one clear line or with every record counted."""

import json
import random
import re
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindspeed_llm.cli.main import main
from mindspeed_llm.data.template import SHIPPED_PATH
from tests.small_tokenizers import byte_level

SECONDS = 20
RECORDS = [{"prompt": f'question {n}, "x"', "response": f"answer\n{n} é"} for n in range(12)]
ALPACA = ["--handler-name", "AlpacaStyleInstructionHandler", "--prompt-type", "qwen"]
PIECES = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b"\n",
    b"\\u",
    b"1e999",
    b"null",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tokenizer, whose facts are already remembered."""
    folder = tmp_path_factory.mktemp("bad")
    byte_level().save_pretrained(folder / "tokenizer")
    (folder / "ok.jsonl").write_text(json.dumps(RECORDS[0]))
    assert preprocess(folder, folder / "ok.jsonl", "first") == 0
    return folder


def preprocess(folder, source, name, *flags):
    command = ["preprocess", "--input", str(source), "--output-prefix", str(folder / name)]
    tokenizer = ["--tokenizer-name-or-path", str(folder / "tokenizer")]
    return main([*command, *tokenizer, "--cache-dir", str(folder / "cache"), *ALPACA, *flags])


def write(path):
    """Write the records in the format of the name."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    elif path.suffix == ".json":
        path.write_text(json.dumps(RECORDS, indent=1))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=5)
    else:
        rows = [(r["prompt"].replace('"', '""'), r["response"]) for r in RECORDS]
        path.write_text("prompt,response\n" + "".join(f'"{q}","{a}"\n' for q, a in rows))


def mutate(content, rng):
    """Damage some bytes."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice([0, 1, 2, 8, 50]))
        action = rng.randrange(5)
        if action == 0:
            del content[start:end]
        elif action == 1:
            content[start:end] = rng.choice(PIECES)
        elif action == 2 and start < len(content):
            content[start] ^= 1 << rng.randrange(8)
        elif action == 3:
            content[start:start] = content[start:end] * 2
        elif action == 4 and rng.random() < 0.3:
            del content[start:]
    return bytes(content)


def check_end(code, prefix, captured, started):
    """A run ends soon, either well, with every record counted, or with one line and no files."""
    assert time.monotonic() - started < SECONDS
    assert "Traceback" not in captured.err
    names = sorted(p.name for p in Path(prefix).parent.glob(f"{Path(prefix).name}*"))
    if code == 0:
        counts = re.search(r"records +(\d+) in = (\d+) written \+ (\d+) skipped", captured.out)
        records, written, skipped = map(int, counts.groups())
        assert records == written + skipped and written > 0
        assert len(names) == 7
        return
    assert code == 2
    errors = [line for line in captured.err.splitlines() if not line.startswith(("WARN", "INFO"))]
    assert len(errors) == 1 and errors[0].startswith("mindspeed-llm: error: "), captured.err
    assert captured.out == "" and names == []


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize(
    "ending, count", [("jsonl", 60), ("json", 40), ("csv", 40), ("parquet", 40)]
)
def test_damaged_data(place, capsys, ending, count, policy):
    good = place / f"good.{ending}"
    write(good)
    rng = random.Random(f"{ending} {policy}")
    failed = 0
    for number in range(count):
        bad = place / f"bad.{ending}"
        bad.write_bytes(mutate(good.read_bytes(), rng))
        capsys.readouterr()
        started, name = time.monotonic(), f"out-{ending}-{policy}-{number}"
        code = preprocess(place, bad, name, "--on-bad-line", policy)
        check_end(code, place / name, capsys.readouterr(), started)
        failed += code != 0
    assert failed > 0


FLAGS = [
    ["--handler-name", "X"], ["--handler-name", ""], ["--prompt-type", "q"], ["--prompt-type", ""],
    ["--prompt-type", "tokenizer"], ["--prompt-type-path", "/nowhere"], ["--seq-length", "-3"],
    ["--seq-length", "x"], ["--seq-length", "1.5"], ["--pack"], ["--neat-pack"], ["--workers", "0"],
    ["--workers", "two"], ["--n-subs", "0"], ["--n-subs", "-1"], ["--map-keys", "{"],
    ["--map-keys", '{"a": "b"}'], ["--map-keys", '{"prompt": []}'], ["--map-keys", "null"],
    ["--map-keys", '{"prompt": "nope"}'], ["--map-keys", "[" * 100_000], ["--input", "/nowhere"],
    ["--input", ""], ["--input", "/"], ["--output-prefix", ""], ["--output-prefix", "/"],
    ["--output-prefix", "/proc/x"], ["--tokenizer-name-or-path", "/nowhere"],
    ["--tokenizer-type", "GPT2BPETokenizer"], ["--too-long", "cut"], ["--special-tokens", "no"],
    ["--on-bad-line", "ignore"], ["--enable-thinking", "maybe"], ["--enable-thinking", "true"],
    ["--json-keys"], ["--placeholder-token"], ["--config", "/nowhere.yaml"], ["--unknown"],
    ["--hander-name", "X"], ["--seq-length", "2"], ["--merge-group-keys", "x"], ["extra"],
    ["--handler-name", "AlpacaStyleProcessRewardHandler"], ["--log-interval", "0"],
    ["--handler-name", "AlpacaStylePairwiseHandler"], ["--handler-name", "GeneralPretrainHandler"],
    ["--handler-name", "SharegptStyleInstructionHandler"], ["--prompt-type", "\udcff"],
]  # fmt: skip


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: flags[0])
def test_wrong_flags(place, capsys, flags):
    write(place / "good.jsonl")
    capsys.readouterr()
    started = time.monotonic()
    try:
        code = preprocess(place, place / "good.jsonl", "flags", *flags)
    except SystemExit as exit:  # argparse's own: usage and one line
        assert exit.code == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("mindspeed-llm preprocess: error: ")
        assert not list(place.glob("flags*"))
        return
    check_end(code, place / "flags", capsys.readouterr(), started)
    assert code == 2


def test_damaged_templates(place, capsys):
    write(place / "good.jsonl")
    rng = random.Random(5)
    content = SHIPPED_PATH.read_bytes()
    entries = json.loads(content)
    qwen = json.dumps([entry for entry in entries if entry["name"] == "qwen"]).encode()
    failed = 0
    for number in range(60):
        (place / "templates.json").write_bytes(mutate(qwen, rng))
        capsys.readouterr()
        started, name = time.monotonic(), f"template-{number}"
        path = str(place / "templates.json")
        code = preprocess(place, place / "good.jsonl", name, "--prompt-type-path", path)
        check_end(code, place / name, capsys.readouterr(), started)
        failed += code != 0
    assert failed > 20


@pytest.mark.parametrize("ending", ["idx", "bin"])
def test_damaged_token_files(place, capsys, ending):
    write(place / "good.jsonl")
    assert preprocess(place, place / "good.jsonl", "shown") == 0
    path = place / f"shown_packed_labels_document.{ending}"
    good, rng, failed = path.read_bytes(), random.Random(ending), 0
    for _ in range(80):
        path.write_bytes(mutate(good, rng))
        capsys.readouterr()
        started = time.monotonic()
        code = main(["show-batch", str(place / "shown"), "--cache-dir", str(place / "cache")])
        captured = capsys.readouterr()
        assert time.monotonic() - started < SECONDS and "Traceback" not in captured.err
        assert code == 0 or (code == 2 and captured.err.count("\n") == 1), captured.err
        failed += code != 0
    path.write_bytes(good)
    assert failed > 20
