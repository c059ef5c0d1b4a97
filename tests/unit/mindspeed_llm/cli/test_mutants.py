"""Hundreds of damaged inputs for each command: one clear line or success, soon, never more."""

import argparse
import json
import re
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.config import flag_name
from mindspeed_llm.cli import convert as convert_command
from mindspeed_llm.cli import preprocess as preprocess_command
from mindspeed_llm.cli import show_batch as show_batch_command
from mindspeed_llm.data.template import SHIPPED_PATH
from mindspeed_llm.data.tokenizer import load_facts
from tests.llm import tiny
from tests.llm.mutants import SECONDS, changed, damaged, flags, mutants, run
from tests.small_tokenizers import byte_level

RECORDS = [{"prompt": f'question {n}, "x"', "response": f"answer\n{n} é"} for n in range(12)]
VALUES = [
    "1",
    "2",
    "0",
    "-1",
    "x",
    "",
    "1e9",
    "99999999999999999999",
    "true",
    "1,2",
    "{",
    "/",
    "\0",
]
VALUES += ["/nowhere", "qwen", "AlpacaStyleInstructionHandler", "hf", "mg", "bf16", "llama2", "é"]


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr("os." + name, lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
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
    words = [word for key, value in values.items() for word in (flag_name(key), value)]
    return ["preprocess", *words, *more]


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
def test_data(place, ending, policy):
    good = (place / f"good.{ending}").read_bytes()
    codes = set()

    @mutants(40)
    @given(damaged(good))
    def check(content):
        bad = place / f"bad.{ending}"
        bad.write_bytes(content)
        end = run(*preprocess(place, bad, "out", "--on-bad-line", policy))
        check_preprocessed(place, end)
        codes.add(end.code)

    check()
    assert codes == {0, 2}


def test_records(place):
    """Valid JSON whose values are not what a handler expects."""

    @mutants(60)
    @given(changed(RECORDS))
    def check(records):
        (place / "bad.json").write_text(json.dumps(records))
        check_preprocessed(place, run(*preprocess(place, place / "bad.json", "out")))

    check()


def test_templates(place):
    entries = json.loads(SHIPPED_PATH.read_bytes())
    qwen = [entry for entry in entries if entry["name"] == "qwen"]

    @mutants(60)
    @given(changed(qwen).map(json.dumps) | damaged(json.dumps(qwen).encode()).map(decoded))
    def check(text):
        path = place / "templates.json"
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        words = preprocess(place, place / "good.jsonl", "out", "--prompt-type-path", path)
        check_preprocessed(place, run(*words))

    check()


def decoded(content):
    return content.decode(errors="surrogateescape")


def test_yaml_of_preprocess(place):
    values = preprocessing(place, place / "good.jsonl", "out") | {"workers": 1, "seq_length": 99}
    check_yaml(values, place / "run.yaml", "preprocess", lambda end: check_preprocessed(place, end))


KEPT = ("save_dir", "output_prefix", "cache_dir", "tokenizer_name_or_path")
"""Options that mutants of a YAML file leave alone: they say where to write, or take seconds."""


def check_yaml(values, path, command, check_end):
    kept = {key: value for key, value in values.items() if key in KEPT}
    other = {key: value for key, value in values.items() if key not in KEPT}
    odd = changed(other).map(yaml.safe_dump).map(str.encode)

    @mutants(60)
    @given(odd | damaged(yaml.safe_dump(other).encode()))
    def check(content):
        path.write_bytes(yaml.safe_dump(kept).encode() + content)
        check_end(run(command, "--config", path))

    check()


def known_flags(command):
    """Return every flag of a command, and whether a value follows it.

    Without those that say where to write, and what takes seconds to read.
    """
    parser = command.add_parser(argparse.ArgumentParser().add_subparsers())
    actions = [action for action in parser._actions if action.dest != "help"]
    found = {a.option_strings[0]: a.nargs != 0 for a in actions if a.option_strings}
    left_out = {"--output-prefix", "--save-dir", "--cache-dir", "--tokenizer-name-or-path"}
    left_out.add("--trust-remote-code")  # reads the tokenizer anew
    return {name: has_value for name, has_value in found.items() if name not in left_out}


def test_flags_of_preprocess(place):
    known = known_flags(preprocess_command)

    @mutants(120)
    @given(flags(known, VALUES))
    def check(words):
        end = run(*preprocess(place, place / "good.jsonl", "out", *words))
        for file in place.glob("out*"):
            assert end.code == 0
            file.unlink()

    check()


@pytest.mark.parametrize("kind", ["idx", "bin", "summary.json"])
def test_token_files(place, kind):
    path = next(place.glob(f"shown*labels*.{kind}"), place / f"shown.{kind}")
    good = path.read_bytes()

    @mutants(80)
    @given(
        damaged(good)
        | (changed(json.loads(good)).map(as_json) if kind[0] == "s" else damaged(good, 40))
    )
    def check(content):
        path.write_bytes(content)
        run("show-batch", place / "shown", "--cache-dir", place / "cache")

    try:
        check()
    finally:
        path.write_bytes(good)


def as_json(value):
    return json.dumps(value).encode()


def test_flags_of_show_batch(place):
    @mutants(80)
    @given(flags(known_flags(show_batch_command), VALUES))
    def check(words):
        run("show-batch", place / "shown", "--cache-dir", place / "cache", *words)

    check()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny.save(name, folder) for name in FAMILIES}


FAMILIES = ["llama3", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek2", "deepseek3"]


def check_converted(target, end):
    assert end.code == 0 or not target.exists() or not any(target.iterdir())
    shutil.rmtree(target, ignore_errors=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_configs(models, tmp_path, family):
    model = shutil.copytree(models[family], tmp_path / "model")
    good = (model / "config.json").read_bytes()

    @mutants(40)
    @given(changed(json.loads(good)).map(as_json) | damaged(good))
    def check(content):
        (model / "config.json").write_bytes(content)
        check_converted(
            tmp_path / "out", run("convert", "--load-dir", model, "--save-dir", tmp_path / "out")
        )

    check()


def test_safetensors(models, tmp_path):
    model = shutil.copytree(models["qwen2"], tmp_path / "model")
    path = model / "model.safetensors"
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])

    def rebuilt(values):
        text = as_json(values)
        return len(text).to_bytes(8, "little") + text + good[8 + length :]

    @mutants(120)
    @given(damaged(good, 8 + length) | changed(header).map(rebuilt))
    def check(content):
        path.write_bytes(content)
        check_converted(
            tmp_path / "out", run("convert", "--load-dir", model, "--save-dir", tmp_path / "out")
        )

    check()


@pytest.mark.parametrize("where", ["beginning", "end", "tracker"])
def test_checkpoints(models, tmp_path, where):
    """Damage to the pickle at the beginning, the directory at the end, the name of the newest."""
    source = tmp_path / "mg"
    assert run("convert", "--load-dir", models["qwen3_moe"], "--save-dir", source).code == 0
    path = source / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    if where == "tracker":
        path = source / "latest_checkpointed_iteration.txt"
    good = path.read_bytes()
    strategy = damaged(good, 6000)
    if where == "end":
        strategy = damaged(good[-6000:]).map(lambda tail: good[:-6000] + tail)

    @mutants(60)
    @given(strategy)
    def check(content):
        path.write_bytes(content)
        words = ("convert", "--load-model-type", "mg", "--save-model-type", "hf")
        check_converted(
            tmp_path / "out", run(*words, "--load-dir", source, "--save-dir", tmp_path / "out")
        )

    check()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_training_checkpoints(models, tmp_path, name):
    """The list of what is where, which is a pickle, and the file with the numbers."""
    import torch
    import torch.distributed.checkpoint as dcp

    mcore, source = tmp_path / "mcore", tmp_path / "mg"
    assert run("convert", "--load-dir", models["qwen2"], "--save-dir", mcore).code == 0
    rank = torch.load(mcore / "iter_0000001/mp_rank_00/model_optim_rng.pt", weights_only=True)
    dcp.save(rank["model"], checkpoint_id=source / "iter_0000001", no_dist=True)
    for other in ("hf", "latest_checkpointed_iteration.txt"):
        (mcore / other).rename(source / other)
    path = source / "iter_0000001" / name
    good = path.read_bytes()
    words = ("convert", "--load-model-type", "mg", "--save-model-type", "hf")
    words += ("--load-dir", source, "--save-dir", tmp_path / "out")
    end = run(*words)
    assert end.code == 0, end.error

    @mutants(60)
    @given(damaged(good))
    def check(content):
        path.write_bytes(content)
        check_converted(tmp_path / "out", run(*words))

    shutil.rmtree(tmp_path / "out")
    check()


def test_yaml_of_convert(models, tmp_path):
    values = {"load_dir": str(models["qwen2"]), "save_dir": str(tmp_path / "out")}
    values |= {"target_tensor_parallel_size": 2, "num_layer_list": "1,3", "params_dtype": "bf16"}
    values |= {"target_pipeline_parallel_size": 2}
    check_yaml(
        values, tmp_path / "run.yaml", "convert", lambda end: check_converted(tmp_path / "out", end)
    )


def test_flags_of_convert(models, tmp_path):
    known = known_flags(convert_command)

    @mutants(120)
    @given(flags(known, VALUES), st.sampled_from(["qwen2", "qwen3_moe"]))
    def check(words, name):
        base = ("convert", "--load-dir", models[name], "--save-dir", tmp_path / "out")
        check_converted(tmp_path / "out", run(*base, *words))

    check()


PROCESSES = {
    "a cut file": ["preprocess", "--input", "cut.parquet", "--output-prefix", "out"],
    "a misspelt flag": ["preprocess", "--imput", "good.jsonl"],
    "a bad YAML file": ["convert", "--config", "bad.yaml"],
    "an empty model": ["convert", "--load-dir", ".", "--save-dir", "out"],
    "no token files": ["show-batch", "nothing"],
}


@pytest.mark.parametrize("words", PROCESSES.values(), ids=PROCESSES.keys())
def test_processes(place, words):
    (place / "cut.parquet").write_bytes((place / "good.parquet").read_bytes()[:-9])
    (place / "bad.yaml").write_text("load_dir: [\n")
    tokenizer = ["--tokenizer-name-or-path", "tokenizer", "--cache-dir", "cache"]
    more = tokenizer if words[0] == "preprocess" else []
    command = [sys.executable, "-m", "mindspeed_llm", *words, *more]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=3 * SECONDS)
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert ": error: " in lines[-1] and len(lines) <= 2 and not list(place.glob("out*"))
