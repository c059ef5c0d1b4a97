"""Work on a second stream: nothing is read before it is written, no memory is used again early."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed.device.side_stream import SideStream, begin_beside
from tests.llm.preferences import Judged, Pair, write_pairs, write_unpaired
from tests.unit.mindspeed_llm.training.tiny_run import VOCABULARY, make_model

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
CYCLES = 50_000_000  # about 25 ms
SIZE, STEPS, BATCH = 1 << 20, 12, 4
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
}
"""Large enough for the kernels of two models to overlap."""


def test_work_does_not_wait_for_what_is_queued():
    side = SideStream()
    torch.cuda._sleep(4 * CYCLES)
    slow = torch.cuda.current_stream().record_event()
    done = torch.cuda.Event()

    def work():
        done.record()
        return []

    side.run(work)
    done.synchronize()
    assert not slow.query()


def test_results_are_there_and_not_written_over():
    given = torch.arange(SIZE, device="cuda", dtype=torch.float32)
    side, sums = SideStream(), []
    for number in range(4):

        def work(number=number):
            torch.cuda._sleep(CYCLES)
            return [given * number]

        (result,) = side.run(work)
        torch.cuda._sleep(CYCLES)
        sums.append(result.sum())
        del result  # and its memory, which the next round may get only after the sum
    expected = [(given * number).sum() for number in range(4)]
    assert torch.equal(torch.stack(sums), torch.stack(expected))


def test_what_is_begun_beside_follows_what_was_queued_and_nothing_later():
    given, done = torch.ones(SIZE, device="cuda"), torch.cuda.Event()
    torch.cuda._sleep(CYCLES)
    given.mul_(2)

    def work():
        given.sub_(2)
        done.record()

    begin_beside(work)
    torch.cuda._sleep(4 * CYCLES)
    slow = torch.cuda.current_stream().record_event()
    done.synchronize()
    assert not slow.query()
    assert not given.any()


def test_what_is_begun_beside_is_waited_for():
    given = torch.ones(SIZE, device="cuda")

    def work():
        torch.cuda._sleep(CYCLES)
        given.zero_()

    wait = begin_beside(work)
    wait()
    assert not given.any()


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_a_reference_beside_the_policy_says_what_it_says_alone(tmp_path, stage):
    model, data = make_model(tmp_path / "model", **SIZES), write_data(tmp_path / "data", stage)
    flags = ["--stage", stage, "--load", model, "--data-path", data, "--bf16"]
    flags += [
        "--npu-deterministic",
        "--train-iters",
        STEPS,
        "--lr",
        1e-5,
        "--micro-batch-size",
        BATCH // 2,
    ]
    flags += ["--global-batch-size", BATCH]
    beside, alone = (run(tmp_path, flags + more) for more in ([], ["--no-overlap-reference"]))
    assert beside == alone and len(beside) == STEPS
    assert stage != "dpo" or beside[0]["lm loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert beside[-1]["lm loss"] != beside[0]["lm loss"]


def write_data(prefix, stage):
    """Write completions of different lengths, up to the longest sequence."""
    generator = np.random.default_rng(0)

    def draw(least, most):
        return generator.integers(1, VOCABULARY, int(generator.integers(least, most))).tolist()

    count = BATCH * STEPS
    if stage == "dpo":
        pairs = [Pair(draw(64, 512), draw(256, 1400), draw(256, 1400)) for _ in range(count)]
        return write_pairs(prefix, pairs)
    samples = [Judged(draw(64, 512), draw(256, 1400), number % 3 > 0) for number in range(count)]
    return write_unpaired(prefix, samples)


def run(folder, flags):
    """Train, and return what is logged of each step but for its time."""
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    command = [sys.executable, ROOT / "posttrain_gpt.py", *flags, "--log-file", log]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    names = ("lm loss", "grad norm", "rewards/chosen", "rewards/rejected", "logps/chosen", "kl")
    return [{name: step[name] for name in names if name in step} for step in steps]
