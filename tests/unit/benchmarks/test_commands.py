"""Logs of training commands become rows; a row that fails is reported."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_commands
from commands import data, logs, pairs
from commands.job import Command, Job
from train_step.shapes import SHAPES

OURS = """
 [2026-11-16 13:11:27] iteration        1/       3 | consumed samples:           16 | elapsed time per iteration (ms): 398.1 | learning rate: 1.000000E-05 | global batch size:    16 | lm loss: 6.254856E+00 | loss scale: 1.0 | grad norm: 1.115 | number of skipped iterations:   0 | number of nan iterations:   0 | tokens/s: 2572.2 |
 [2026-11-16 13:11:28] iteration        2/       3 | consumed samples:           32 | elapsed time per iteration (ms): 500.0 | learning rate: 1.000000E-05 | global batch size:    16 | lm loss: 6.242329E+00 | loss scale: 1.0 | grad norm: 1.093 | number of skipped iterations:   0 | number of nan iterations:   0 | tokens/s: 2000.0 |
evaluation at iteration 2 | validation lm loss: 6.100000E+00
 [2026-11-16 13:11:28] iteration        3/       3 | consumed samples:           48 | elapsed time per iteration (ms): 250.0 | learning rate: 1.000000E-05 | global batch size:    16 | lm loss: 6.200000E+00 | loss scale: 1.0 | grad norm: 1.093 | number of skipped iterations:   0 | number of nan iterations:   0 | tokens/s: 2400.0 |
peak memory of rank 0: 71.25 GiB
"""  # noqa: E501
MEGATRON = """
 > finished creating GPT datasets ...
 [2026-11-16 12:00:01.100000] iteration        1/       2 | consumed samples:           16 | elapsed time per iteration (ms): 12000.0 | throughput per GPU (TFLOP/s/GPU): 55.9 | learning rate: 1.000000E-05 | global batch size:    16 | lm loss: 1.193000E+01 | loss scale: 1.0 | grad norm: 2.143 | number of skipped iterations:   0 | number of nan iterations:   0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 27003.23 | max allocated: 51200.00 | reserved: 60000.00 | max reserved: 60000.00
 [2026-11-16 12:00:02.500000] iteration        2/       2 | consumed samples:           32 | elapsed time per iteration (ms): 1638.4 | throughput per GPU (TFLOP/s/GPU): 409.1 | learning rate: 1.000000E-05 | global batch size:    16 | lm loss: 1.190000E+01 | loss scale: 1.0 | grad norm: 2.100 | number of skipped iterations:   0 | number of nan iterations:   0 |
[Rank 0] (after 2 iterations) memory (MB) | allocated: 27003.23 | max allocated: 61440.00 | reserved: 70000.00 | max reserved: 70000.00
"""  # noqa: E501
TITAN = """
[titan] 2026-11-16 12:00:00,000 - root - INFO - Training starts at step 1
[titan] 2026-11-16 12:00:30,000 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.23446  \x1b[38;2;180;60;0mgrad_norm:  1.9430  \x1b[38;2;54;234;195mmemory: 85.04GiB(60.83%)  \x1b[34mtps: 2,013  \x1b[36mtflops: 22.91  \x1b[35mmfu: 2.32%\x1b[39m
[titan] 2026-11-16 12:00:31,000 - root - INFO - \x1b[31mstep:  2  \x1b[32mloss: 12.10000  \x1b[38;2;180;60;0mgrad_norm:  1.9430  \x1b[38;2;54;234;195mmemory: 86.50GiB(61.83%)  \x1b[34mtps: 50,000  \x1b[36mtflops: 568.80  \x1b[35mmfu: 57.51%\x1b[39m
"""  # noqa: E501
JSON = """
attention: sdpa
Packing train dataset: 100%|##########| 224/224 [00:00<00:00, 669.84 examples/s]
{"step": 1, "seconds": 4.0, "tokens": 556, "peak_gib": 11.5, "loss": 6.3}
{'loss': '6.3', 'grad_norm': '1.2', 'learning_rate': '1e-05', 'epoch': '0.1'}
{"step": 2, "seconds": 0.5, "tokens": 600, "peak_gib": 12.5, "loss": 6.2}
"""
ARRIVALS = """
[INFO|trainer.py:2519] 2026-11-16 12:00:00,000 >> ***** Running training *****
{'loss': 12.1, 'grad_norm': 2.1, 'learning_rate': 1e-05, 'epoch': 0.1, 'num_input_tokens_seen': 65536}
{'loss': 12.0, 'grad_norm': 2.1, 'learning_rate': 1e-05, 'epoch': 0.2, 'num_input_tokens_seen': 131072}
"""  # noqa: E501


SWIFT = """
{'loss': 6.25, 'grad_norm': 1.0, 'memory(GiB)': 1.5, 'train_speed(s/it)': 4.0}
{'loss': 6.20, 'grad_norm': 1.0, 'memory(GiB)': 2.5, 'train_speed(s/it)': 2.5}
{'loss': 6.10, 'grad_norm': 1.0, 'memory(GiB)': 2.5, 'train_speed(s/it)': 2.0}
"""


def stamped(text):
    return [(2.0 * number, line) for number, line in enumerate(text.splitlines())]


def test_our_lines_count_their_tokens_themselves():
    log = logs.read_megatron(stamped(OURS), None)
    assert [step.number for step in log.steps] == [1, 2, 3]
    assert [round(step.tokens) for step in log.steps] == [1024, 1000, 600]
    row = logs.summarise(log, warm_up=1)
    assert row["tokens_per_s"] == "2200" and row["mean_tokens_per_s"] == "2133"
    assert (row["slowest"], row["fastest"], row["steps"]) == ("2000", "2400", "2")
    assert (row["first_step_s"], row["until_step_1_s"]) == ("0.40", "2.0")
    assert (row["peak_gib"], row["loss"]) == ("71.2", "6.200")


def test_lines_of_megatron_need_the_tokens_of_a_step():
    log = logs.read_megatron(stamped(MEGATRON), 65536)
    row = logs.summarise(log, warm_up=1)
    assert (row["tokens_per_s"], row["peak_gib"], row["loss"]) == ("40000", "60.0", "11.900")


def test_lines_of_torchtitan_have_colours():
    log = logs.read_titan(stamped(TITAN), 65536)
    row = logs.summarise(log, warm_up=1)
    assert (row["tokens_per_s"], row["peak_gib"], row["loss"]) == ("50000", "86.5", "12.100")
    assert row["first_step_s"] == "32.56"


def test_lines_of_scripts_are_json():
    row = logs.summarise(logs.read_json(stamped(JSON), None), warm_up=1)
    assert (row["tokens_per_s"], row["peak_gib"], row["loss"]) == ("1200", "12.5", "6.200")


def test_lines_without_seconds_are_timed_by_their_arrival():
    row = logs.summarise(logs.read_arrivals(stamped(ARRIVALS), None), warm_up=1)
    assert (row["tokens_per_s"], row["loss"], row["peak_gib"]) == ("32768", "12.000", "")


def test_lines_of_ms_swift_are_means_over_all_steps():
    log = logs.read_swift(stamped(SWIFT), 1024)
    assert [step.seconds for step in log.steps] == pytest.approx([4.0, 1.0, 1.0])
    row = logs.summarise(log, warm_up=1)
    assert (row["tokens_per_s"], row["peak_gib"], row["loss"]) == ("1024", "2.5", "6.100")
    assert row["first_step_s"] == "4.00"


def test_a_log_without_steps_has_no_row():
    for read in logs.FORMATS.values():
        assert read(stamped("Traceback (most recent call last):"), 1).steps == []


def test_lengths_of_conversations_are_those_of_instruction_data():
    text = data.Text(512, seed=1)
    lengths = data.conversation_lengths(text.generator, 20000, 4096)
    assert 600 < lengths.mean() < 900 and lengths.max() <= 4096 - data.TEMPLATE
    assert (lengths < 300).mean() > 0.2 and (lengths > 2000).mean() > 0.03


def test_words_are_tokens():
    words, text = data.tokenizer(512), data.Text(512, seed=1)
    assert len(words(text.draw(50))["input_ids"]) == 50
    turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    around = words(words.apply_chat_template(turns, tokenize=False))["input_ids"]
    assert around.count(words.convert_tokens_to_ids("<|im_start|>")) == 2
    assert len(around) <= data.TEMPLATE


@pytest.fixture
def job(tmp_path):
    return Job(SHAPES["tiny"], "tiny", 3, tmp_path)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_pairs_have_prompts_of_the_share_that_is_asked_for(job, tmp_path, share):
    pairs._write_pairs(replace(job, prompt_share=share), tmp_path / "pairs.jsonl", 64, 3)
    words = data.tokenizer(job.shape.vocabulary)
    for line in (tmp_path / "pairs.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert len(words(record["instruction"])["input_ids"]) == 64 * share
        for side in ("chosen", "rejected"):
            asked = {"role": "user", "content": record["instruction"]}
            turns = [asked, {"role": "assistant", "content": record[side]}]
            assert len(words(words.apply_chat_template(turns, tokenize=False))["input_ids"]) == 64
    for wrong in ("0", "1", "-1", "2"):
        with pytest.raises(argparse.ArgumentTypeError, match="between 0 and 1"):
            bench_commands._share(wrong)


def test_a_command_is_run_with_the_packages_of_its_site(job):
    program = "import os; print(os.environ['PYTHONPATH'].split(os.pathsep)[0], os.environ['RANK'])"
    command = Command([sys.executable, "-c", program], "json", site="peer")
    job.sites["peer"] = "/packages"
    ((seconds, line),) = bench_commands.run(command, job, "row:2", 60)
    assert line == "/packages 0" and seconds > 0
    assert (job.folder / "logs" / "row_2.txt").read_text() == "/packages 0\n"


def test_a_command_that_fails_says_why(job):
    command = Command([sys.executable, "-c", "raise SystemExit('no such flag')"], "json")
    with pytest.raises(bench_commands.Failed, match=r"exit code 1; .*row_2.txt ends(.|\n)*flag"):
        bench_commands.run(command, job, "row:2", 60)


def test_a_command_that_hangs_is_ended(job):
    command = Command([sys.executable, "-c", "import time; time.sleep(60)"], "json")
    with pytest.raises(bench_commands.Failed, match="not done after 0.5 s"):
        bench_commands.run(command, job, "row:2", 0.5)


def test_a_command_is_stopped_after_its_last_step(job):
    program = "import time\nfor n in range(9): print('step', n, flush=True)\ntime.sleep(60)"
    command = Command([sys.executable, "-c", program], "json", stop_after=("step", 3))
    lines = bench_commands.run(command, job, "row:2", 30)
    assert [line for _, line in lines][:3] == ["step 0", "step 1", "step 2"]


def test_rows_are_named_by_command_and_micro_batch():
    def rows(only, shape="1.5B"):
        return bench_commands.rows_of(argparse.Namespace(only=only, shape=shape))

    assert rows("pretrain") == ["pretrain:2", "pretrain:4"]
    assert rows("sft-packed:8,vlm") == ["sft-packed:8", "vlm:2"]
    assert rows("", "8B") == ["pretrain:1", "first-start:1", "second-start:1", "torchtitan:1"]
    with pytest.raises(SystemExit, match="--only pretrian: use NAME or NAME:BATCH, of pretrain,"):
        rows("pretrian")
    assert {row for pair in bench_commands.RATIOS for row in pair} <= {*rows(""), *rows("", "8B")}
