"""A whole run: the same output whatever the format, blocks and workers, and after any kill."""

import argparse
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindspeed.config import ConfigError, add_flags
from mindspeed_llm.data.handlers import HANDLERS, PRETRAIN
from mindspeed_llm.data.indexed import IndexedTokens
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.preprocess import preprocess
from tests.small_tokenizers import TEXT, byte_level

ALPACA = {"handler_name": "AlpacaStyleInstructionHandler", "prompt_type": "qwen"}
WORDS = TEXT.split()


def make_records(count, seed=0):
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 40))) for _ in range(2 * count)]
    return [{"prompt": q, "response": a} for q, a in zip(texts[::2], texts[1::2])]


def contents(prefix):
    """The bytes of every token file of a prefix."""
    folder = Path(prefix).parent
    names = sorted(folder.glob(f"{Path(prefix).name}_*_document.*"))
    return {path.name.removeprefix(Path(prefix).name): path.read_bytes() for path in names}


def test_the_format_does_not_matter(run, write_lines, tmp_path):
    records = make_records(30)
    _, prefix = run(write_lines(records), name="jsonl", **ALPACA)
    expected = contents(prefix)
    assert len(expected) == 6
    (tmp_path / "d.json").write_text(json.dumps(records, indent=1))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "d.parquet", row_group_size=7)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, part in (("1.jsonl", records[:10]), ("2.json", records[10:])):
        (folder / name).write_text(
            "\n".join(map(json.dumps, part)) if name == "1.jsonl" else json.dumps(part)
        )
    for index, source in enumerate((tmp_path / "d.json", tmp_path / "d.parquet", folder)):
        _, prefix = run(source, name=f"out{index}", **ALPACA)
        assert contents(prefix) == expected


@pytest.mark.parametrize("options", [ALPACA, {"json_keys": ("response",)}], ids=["samples", "text"])
def test_blocks_and_workers_do_not_matter(write_lines, tmp_path, facts, options):
    source = write_lines(make_records(200))
    outputs = []
    for name, workers, size in (("one", 1, 4 << 20), ("small", 1, 700), ("two", 2, 3000)):
        chosen = PreprocessOptions(
            input=source, output_prefix=str(tmp_path / name), workers=workers, n_subs=2, **options
        )
        summary = preprocess(chosen, facts, block_bytes=size)
        assert summary.records == summary.written == 200
        outputs.append((contents(tmp_path / name), summary.tokens, summary.longest_at))
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("size", [300, 4 << 20])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_stops_the_run_and_leaves_nothing(tmp_path, facts, size, workers):
    lines = [json.dumps(record) for record in make_records(60)]
    lines[40] = lines[40][:-3]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    options = PreprocessOptions(
        input=str(tmp_path / "d.jsonl"),
        output_prefix=str(tmp_path / "out"),
        workers=workers,
        **ALPACA,
    )
    with pytest.raises(ConfigError, match=r"d.jsonl, line 41: is not valid JSON: .*skip$"):
        preprocess(options, facts, block_bytes=size)
    assert os.listdir(tmp_path) == ["d.jsonl"]


def test_records_without_a_token_are_no_data(tmp_path, facts):
    (tmp_path / "d.jsonl").write_text('{"text": ""}\n' * 3)
    options = PreprocessOptions(
        input=str(tmp_path / "d.jsonl"),
        output_prefix=str(tmp_path / "out"),
        handler_name="GeneralPretrainHandler",
    )
    with pytest.raises(ConfigError, match="3 records without a single token: check --json-keys"):
        preprocess(options, facts)
    assert os.listdir(tmp_path) == ["d.jsonl"]


def test_bad_lines_are_skipped_if_configured(tmp_path, facts, caplog):
    records = make_records(60)
    lines = [json.dumps(record) for record in records]
    for index in range(5, 60, 4):
        lines[index] = lines[index].replace("response", "respnse")
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    for size in (300, 4 << 20):
        caplog.clear()
        options = PreprocessOptions(
            input=str(tmp_path / "d.jsonl"),
            output_prefix=str(tmp_path / f"out{size}"),
            on_bad_line="skip",
            **ALPACA,
        )
        summary = preprocess(options, facts, block_bytes=size)
        assert (summary.records, summary.written, summary.skipped_records) == (60, 46, 14)
        assert summary.skipped["malformed"].first.endswith("line 6")
        messages = [record.getMessage() for record in caplog.records]
        assert sum("skipped:" in text for text in messages) == 10, "ten are named, the rest counted"
        assert "line 6: has no response; it has prompt, respnse" in messages[0]
    good = [record for index, record in enumerate(records) if index < 5 or (index - 5) % 4]
    (tmp_path / "good.jsonl").write_text("\n".join(map(json.dumps, good)))
    whole = PreprocessOptions(
        input=str(tmp_path / "good.jsonl"), output_prefix=str(tmp_path / "good"), **ALPACA
    )
    preprocess(whole, facts)
    assert contents(tmp_path / "good") == contents(tmp_path / f"out{4 << 20}")


@pytest.mark.parametrize("append_eod", [False, True])
def test_documents_that_are_skipped_do_not_count_as_written(run, write_lines, facts, append_eod):
    records = [{"text": "one"}, {"txt": "two"}, {"text": 3}, {"text": ""}, {"text": "five"}]
    options = {"handler_name": "GeneralPretrainHandler", "append_eod": append_eod}
    summary, prefix = run(write_lines(records), on_bad_line="skip", **options)
    assert (summary.records, summary.written, summary.skipped_records) == (5, 3, 2)
    assert summary.skipped["malformed"].first.endswith("line 2")
    data = IndexedTokens(f"{prefix}_text_document")
    assert len(data) == 2, "an empty document has no sequence"
    assert len(data.documents) - 1 == summary.written
    tokenizer = byte_level()
    ending = [facts.eos_id] if append_eod else []
    for found, text in zip(data, ("one", "five"), strict=True):
        assert found.tolist() == [*tokenizer.encode(text, add_special_tokens=False), *ending]
    assert data.tokens == summary.tokens


def test_a_stopped_run_is_resumed(tmp_path, facts, write_lines):
    source = write_lines(make_records(100))
    whole = PreprocessOptions(input=source, output_prefix=str(tmp_path / "whole"), **ALPACA)
    full = preprocess(whole, facts, block_bytes=500)
    again = PreprocessOptions(input=source, output_prefix=str(tmp_path / "again"), **ALPACA)
    for stop in (3, 9, 10):
        calls = 0

        def interrupt(summary, size, stop=stop):
            nonlocal calls
            calls += 1
            if calls == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            preprocess(again, facts, interrupt, block_bytes=500, save_seconds=0)
        assert contents(tmp_path / "again") == {}
        state = json.loads((tmp_path / "again.partial" / "state.json").read_bytes())["state"]
        assert state["blocks"] >= stop - 1
    summary = preprocess(again, facts, block_bytes=500)
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")
    assert {**summary.as_dict(), "seconds": 0} == {**full.as_dict(), "seconds": 0}
    assert not (tmp_path / "again.partial").exists()


def test_other_data_is_not_resumed(tmp_path, facts, write_lines):
    source = write_lines(make_records(50))
    options = PreprocessOptions(input=source, output_prefix=str(tmp_path / "out"), **ALPACA)

    def interrupt(summary, size):
        if summary.records > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(options, facts, interrupt, block_bytes=500, save_seconds=0)
    write_lines(make_records(7, seed=1))
    assert preprocess(options, facts, block_bytes=500).records == 7


def test_publishing_is_resumed_by_the_next_run(tmp_path, facts, write_lines, monkeypatch):
    source = write_lines(make_records(20))
    options = PreprocessOptions(input=source, output_prefix=str(tmp_path / "out"), **ALPACA)
    preprocess(options, facts)
    expected = contents(tmp_path / "out")
    real = os.replace
    for moves in range(1, 8):
        moved = 0

        def replace(here, there, moves=moves):
            nonlocal moved
            if str(there).startswith(str(tmp_path / "out_")):
                moved += 1
                if moved == moves:
                    raise KeyboardInterrupt
            real(here, there)

        monkeypatch.setattr(os, "replace", replace)
        if moves < 7:
            with pytest.raises(KeyboardInterrupt):
                preprocess(options, facts)
            assert len(contents(tmp_path / "out")) < 6
        monkeypatch.setattr(os, "replace", real)
        assert preprocess(options, facts).written == 20
        assert contents(tmp_path / "out") == expected


def test_two_runs_do_not_share_an_output(tmp_path, facts, write_lines):
    options = PreprocessOptions(
        input=write_lines(make_records(5)), output_prefix=str(tmp_path / "out"), **ALPACA
    )

    def second(summary, size):
        with pytest.raises(ConfigError, match="another run is writing there now"):
            preprocess(options, facts)

    assert preprocess(options, facts, second).written == 5


@pytest.mark.parametrize(
    "prefix, message", [("", "missing"), ("{}", "is a folder"), ("{}/data.jsonl/x", "")]
)
def test_wrong_output_prefixes(tmp_path, facts, write_lines, prefix, message):
    source = write_lines(make_records(2))
    options = PreprocessOptions(input=source, output_prefix=prefix.format(tmp_path), **ALPACA)
    with pytest.raises(ConfigError, match=f"--output-prefix.*{message}"):
        preprocess(options, facts)


def test_a_full_disk(tmp_path, facts, write_lines):
    """A limit on the size of files stands for a full disk: the same call fails in the same way."""
    source = write_lines(make_records(200))
    whole = PreprocessOptions(input=source, output_prefix=str(tmp_path / "whole"), **ALPACA)
    preprocess(whole, facts, block_bytes=500)
    options = PreprocessOptions(input=source, output_prefix=str(tmp_path / "out"), **ALPACA)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match="File too large; progress is kept in"):
            preprocess(options, facts, block_bytes=500, save_seconds=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path / "out") == {}
    assert preprocess(options, facts, block_bytes=500).written == 200
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


DRIVER = """
import pickle, sys
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.preprocess import preprocess
if __name__ == "__main__":
    options, facts = pickle.load(open(sys.argv[1], "rb"))
    print("go", flush=True)
    preprocess(PreprocessOptions(**options), facts, block_bytes=4000, save_seconds=0)
"""


def test_killed_at_random_moments(tmp_path, facts, write_lines):
    """SIGKILL leaves nothing under a final name; the run after it gives the same files."""
    source = write_lines(make_records(2000))
    extra = {"pack": True, "neat_pack": True, "seq_length": 512}
    options = {"input": source, "workers": 2, **ALPACA, **extra}
    whole = preprocess(PreprocessOptions(output_prefix=str(tmp_path / "whole"), **options), facts)
    options["output_prefix"] = str(tmp_path / "out")
    (tmp_path / "job").write_bytes(pickle.dumps((options, facts)))
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "job")]
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"}
    rng, kills = random.Random(1), 0
    while True:
        run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert run.stdout.readline() == "go\n"
        time.sleep(rng.uniform(0, 1.5))
        run.send_signal(signal.SIGKILL)
        if run.wait(60) == 0:
            break
        kills += 1
        left, expected = contents(tmp_path / "out"), contents(tmp_path / "whole")
        is_continued = (tmp_path / "out.partial" / "state.json").exists()
        assert is_continued or not left or left == expected  # or it had just finished
        assert all(expected[name] == content for name, content in left.items())
        if kills == 3:
            finished = subprocess.run(command, env=environment, timeout=120)
            assert finished.returncode == 0
            break
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    stored = json.loads((tmp_path / "out.summary.json").read_bytes())["summary"]
    assert stored["records"] == whole.records == 2000 and stored["written"] == whole.written


PAGE = (Path(__file__).parents[4] / "docs/llm/preprocess.md").read_text()


def test_every_flag_is_explained_as_in_the_help():
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, PreprocessOptions)
    for action in parser._actions:
        help_text = action.help.replace("%%", "%")
        assert f"| `{action.option_strings[0]}` | {help_text} |\n" in PAGE


def test_every_handler_is_in_the_table():
    assert all(f"| `{name}` |" in PAGE for name in (PRETRAIN, *HANDLERS))
