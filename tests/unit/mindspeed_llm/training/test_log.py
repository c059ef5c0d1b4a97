"""The lines of a training's log: means over an interval, and only what there is to tell."""

import json

import pytest

from mindspeed_llm.training.log import TrainingLog
from mindspeed_llm.training.step import StepResult


def step(loss, tokens, **more):
    usual = {"grad_norm": 1.0, "loss_scale": 1.0, "is_updated": True, "is_finite": True}
    usual |= {"is_asked_to_stop": False}
    return StepResult(losses={"loss": loss}, tokens=tokens, **usual | more)


@pytest.fixture
def written(tmp_path):
    """Log steps, two a line; return what was written."""

    def log(*steps):
        file = tmp_path / "log.jsonl"
        training = TrainingLog(every=2, total=100, batch=8, is_writer=True, file=file)
        training.begin(0)
        for number, each in enumerate(steps, 1):
            training.add(number, 8 * number, 0.1, each)
        return [json.loads(line) for line in file.read_text().splitlines()]

    return log


def test_a_line_is_the_mean_of_its_steps(written):
    first, second = written(step(1.0, 10), step(2.0, 30), step(4.0, 10), step(5.0, 10))
    assert (first["iteration"], first["loss"], second["loss"]) == (2, 1.5, 4.5)
    assert first["tokens/s"] > 0 and first["consumed samples"] == 16


def test_steps_that_are_no_numbers_are_counted_and_not_in_the_mean(written):
    (line,) = written(step(float("nan"), 10, is_finite=False, is_updated=False), step(2.0, 10))
    assert line["loss"] == 2.0
    assert (line["number of nan iterations"], line["number of skipped iterations"]) == (1, 0)


def test_without_tokens_there_is_no_speed_of_them(written):
    (line,) = written(step(1.0, 0), step(2.0, 0))
    assert "tokens/s" not in line
