"""Hundreds of damaged inputs for each command: one clear line or success, soon, never more."""

import json
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from mindspeed.config import flag_name
from mindspeed_llm.cli import preprocess as preprocess_command
from mindspeed_llm.cli import show_batch as show_batch_command
from mindspeed_llm.data.template import SHIPPED_PATH
from mindspeed_llm.data.tokenizer import load_facts
from tests.llm.mutants import (
    VALUES,
    as_json,
    changed,
    check_yaml,
    damaged,
    flags,
    known_flags,
    mutants,
    run,
)
from tests.small_tokenizers import byte_level

RECORDS = [{"prompt": f'question {n}, "x"', "response": f"answer\n{n} é"} for n in range(12)]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A folder with a tokenizer, data in every format, and token files."""
    folder = tmp_path_factory.mktemp("mutants")
    byte_level().save_pretrained(folder / "tokenizer")
    (folder / "good.jsonl").write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    (folder / "good.json").write_text(json.dumps(RECORDS, indent=1))
    pq.write_table(pa.Table.from_pylist(RECORDS), folder / "good.parquet", row_group_size=5)
    rows = [(r["prompt"].replace('"', '""'), r["response"]) for r in RECORDS]
    lines = (f'"{question}","{answer}"\n' for question, answer in rows)
    (folder / "good.csv").write_text("prompt,response\n" + "".join(lines))
    load_facts(str(folder / "tokenizer"), cache_dir=str(folder / "cache"))  # slow, once
    assert run(*preprocess(folder, folder / "good.jsonl", "shown")).code == 0
    return folder


def preprocess(folder, source, name, *more):
    values = preprocessing(folder, source, name)
    arguments = [argument for key, value in values.items() for argument in (flag_name(key), value)]
    return ["preprocess", *arguments, *more]


def preprocessing(folder, source, name):
    return {
        "input": str(source),
        "output_prefix": str(folder / name),
        "tokenizer_name_or_path": str(folder / "tokenizer"),
        "cache_dir": str(folder / "cache"),
        "handler_name": "AlpacaStyleInstructionHandler",
        "prompt_type": "qwen",
    }


def check_preprocessed(folder, end):
    """Every record is counted, or nothing stands there; then clean up."""
    files = list(folder.glob("out*"))
    if end.code == 0:
        counts = re.search(r"records +(\d+) in = (\d+) written \+ (\d+) skipped", end.out)
        records, written, skipped = map(int, counts.groups())
        assert records == written + skipped and written > 0 and len(files) == 7
    else:
        assert end.out == "" and files == []
    for file in files:
        file.unlink()


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_data(workdir, ending, policy):
    good = (workdir / f"good.{ending}").read_bytes()
    codes = set()

    @mutants(2)
    @given(damaged(good))
    def check(content):
        bad = workdir / f"bad.{ending}"
        bad.write_bytes(content)
        end = run(*preprocess(workdir, bad, "out", "--on-bad-line", policy))
        check_preprocessed(workdir, end)
        codes.add(end.code)

    check()
    assert codes == {0, 2}


def test_records(workdir):
    """Valid JSON whose values are not what a handler expects."""

    @mutants()
    @given(changed(RECORDS))
    def check(records):
        (workdir / "bad.json").write_text(json.dumps(records))
        check_preprocessed(workdir, run(*preprocess(workdir, workdir / "bad.json", "out")))

    check()


def test_templates(workdir):
    entries = json.loads(SHIPPED_PATH.read_bytes())
    qwen = [entry for entry in entries if entry["name"] == "qwen"]

    @mutants()
    @given(changed(qwen).map(json.dumps) | damaged(json.dumps(qwen).encode()).map(decoded))
    def check(text):
        path = workdir / "templates.json"
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        arguments = preprocess(workdir, workdir / "good.jsonl", "out", "--prompt-type-path", path)
        check_preprocessed(workdir, run(*arguments))

    check()


def decoded(content):
    return content.decode(errors="surrogateescape")


def test_yaml_of_preprocess(workdir):
    values = preprocessing(workdir, workdir / "good.jsonl", "out") | {
        "workers": 1,
        "seq_length": 99,
    }
    check_yaml(
        values, workdir / "run.yaml", "preprocess", lambda end: check_preprocessed(workdir, end)
    )


def test_flags_of_preprocess(workdir):
    known = known_flags(preprocess_command)

    @mutants(2)
    @given(flags(known, VALUES))
    def check(arguments):
        end = run(*preprocess(workdir, workdir / "good.jsonl", "out", *arguments))
        for file in workdir.glob("out*"):
            assert end.code == 0
            file.unlink()

    check()


@pytest.mark.parametrize("kind", ["idx", "bin", "summary.json"])
def test_token_files(workdir, kind):
    path = next(workdir.glob(f"shown*labels*.{kind}"), workdir / f"shown.{kind}")
    good = path.read_bytes()

    @mutants(1.5)
    @given(
        damaged(good)
        | (changed(json.loads(good)).map(as_json) if kind[0] == "s" else damaged(good, 40))
    )
    def check(content):
        path.write_bytes(content)
        run("show-batch", workdir / "shown", "--cache-dir", workdir / "cache")

    try:
        check()
    finally:
        path.write_bytes(good)


def test_flags_of_show_batch(workdir):
    @mutants(1.5)
    @given(flags(known_flags(show_batch_command), VALUES))
    def check(arguments):
        run("show-batch", workdir / "shown", "--cache-dir", workdir / "cache", *arguments)

    check()


PROCESSES = {
    "a cut file": ["preprocess", "--input", "cut.parquet", "--output-prefix", "out"],
    "a misspelt flag": ["preprocess", "--imput", "good.jsonl"],
    "a bad YAML file": ["convert", "--config", "bad.yaml"],
    "an empty model": ["convert", "--load-dir", ".", "--save-dir", "out"],
    "no token files": ["show-batch", "nothing"],
}


@pytest.mark.parametrize("arguments", PROCESSES.values(), ids=PROCESSES.keys())
def test_processes(workdir, arguments):
    (workdir / "cut.parquet").write_bytes((workdir / "good.parquet").read_bytes()[:-9])
    (workdir / "bad.yaml").write_text("load_dir: [\n")
    tokenizer = ["--tokenizer-name-or-path", "tokenizer", "--cache-dir", "cache"]
    more = tokenizer if arguments[0] == "preprocess" else []
    command = [sys.executable, "-m", "mindspeed_llm", *arguments, *more]
    done = subprocess.run(command, cwd=workdir, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert ": error: " in lines[-1] and len(lines) <= 2 and not list(workdir.glob("out*"))
