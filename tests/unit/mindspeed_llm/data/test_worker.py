"""Worker processes, copied from a loaded parent or started afresh: none is ever left or missed."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.preprocess import preprocess

DRIVER = """
import itertools, multiprocessing, os, pickle, signal, sys, threading, time
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.preprocess import preprocess

calls = itertools.count()

def report(summary, size):
    if next(calls):
        return  # blocks that were done when a worker was killed: there may be no worker any more
    workers = multiprocessing.active_children()
    print(type(workers[0]).__name__, *(worker.pid for worker in workers), flush=True)
    if sys.argv[2] == "kill":
        os.kill(workers[0].pid, signal.SIGKILL)
    if sys.argv[2] == "wait":
        time.sleep(60)

if __name__ == "__main__":
    if sys.argv[3] == "SpawnProcess":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    options, facts = pickle.load(open(sys.argv[1], "rb"))
    preprocess(PreprocessOptions(**options), facts, report, block_bytes=4000, save_seconds=0)
"""

KINDS = ("ForkProcess", "SpawnProcess")
pytestmark = [
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has one process"),
]


@pytest.fixture
def start(tmp_path, facts, write_lines):
    """Start a run of its own, in a session of its own; its output is that of `expected`."""
    records = [{"prompt": f"question {n}", "response": "the answer " * (n % 9)} for n in range(999)]
    options = {
        "input": write_lines(records),
        "handler_name": "AlpacaStyleInstructionHandler",
        "prompt_type": "qwen",
        "output_prefix": str(tmp_path / "out"),
        "workers": 2,
    }
    (tmp_path / "job").write_bytes(pickle.dumps((options, facts)))
    (tmp_path / "driver.py").write_text(DRIVER)
    path = f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"

    def start(action, kind):
        command = [sys.executable, tmp_path / "driver.py", tmp_path / "job", action, kind]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)

    start.options = options
    return start


def outputs(tmp_path, name="out"):
    return {path.suffixes[-1]: path.read_bytes() for path in tmp_path.glob(f"{name}_*_ids_*")}


def first_workers(run, kind):
    """The ids of the workers, once the first block is written."""
    found, *workers = run.stdout.readline().split()
    assert found == kind and len(workers) == 2, run.communicate()
    return [Path(f"/proc/{worker}") for worker in workers]


def test_both_kinds_of_workers_write_the_same(tmp_path, facts, start, kind):
    run = start("go", kind)
    out, errors = run.communicate(timeout=120)
    assert run.returncode == 0 and not errors, errors
    assert kind in out
    alone = {**start.options, "workers": 1, "output_prefix": str(tmp_path / "alone")}
    preprocess(PreprocessOptions(**alone), facts)
    assert outputs(tmp_path) == outputs(tmp_path, "alone") != {}


def test_a_worker_that_is_killed_is_reported(tmp_path, facts, start, kind):
    run = start("kill", kind)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 1
    assert errors.endswith("a worker process died (out of memory?): use fewer --workers\n")
    assert outputs(tmp_path) == {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path, facts, start, kind, number):
    run = start("wait", kind)
    workers = first_workers(run, kind)
    if number == signal.SIGINT:
        os.killpg(run.pid, number)  # as a terminal does
    else:
        run.send_signal(number)
    run.wait(120)
    assert run.returncode in (-number, 128 + number)
    assert outputs(tmp_path) == {}
    # Only the parent held the output, so it is free at once.
    options = PreprocessOptions(**{**start.options, "workers": 1})
    assert preprocess(options, facts, block_bytes=4000).records == 999
    _, errors = run.communicate(timeout=120)
    assert errors.count("Traceback") == (number == signal.SIGINT), errors
    deadline = time.monotonic() + 120
    while any(worker.exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(worker.exists() for worker in workers)
