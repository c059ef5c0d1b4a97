"""The steps of a run: which rate each takes, what is saved, evaluated and counted when."""

from types import SimpleNamespace

import pytest

from mindspeed.training.metrics import StepResult
from mindspeed_llm.training.course import Course
from mindspeed_llm.training.folders import Progress
from mindspeed_llm.training.options import TrainOptions

STEPS = 8


class Saves:
    """Takes down what is saved."""

    def __init__(self):
        self.saved, self.is_finished = [], False

    def save(self, progress, *, keep_last=None, in_background=False):
        self.saved.append((progress.iteration, progress.consumed_samples))

    def poll(self):
        pass

    def finish(self):
        self.is_finished = True


class Run(Course):
    """Steps that compute nothing and take down what they were given."""

    def __init__(self, *, begun=0, bad=(), **options):
        self.saves, self.taken, self.evaluated = Saves(), [], []
        self._bad = bad
        group = {"lr": -1.0, "lr_mult": 1.0, "wd_mult": 1.0, "weight_decay": -1.0}
        self.optimizer = SimpleNamespace(param_groups=[group])
        super().__init__(
            TrainOptions(**{"lr": 1.0, "lr_decay_style": "linear", "lr_warmup_iters": 2} | options),
            self.saves,
            self.optimizer,
            self.note(begun, begun * 4),
            steps=STEPS,
            batch=4,
            rank=0,
            world=1,
        )

    def learn(self, progress, stop):
        group = self.optimizer.param_groups[0]
        iteration = progress.iteration + 1
        self.taken.append((iteration, progress.consumed_samples, group["lr"]))
        is_finite = iteration not in self._bad
        return StepResult(
            metrics={"loss": 1.0},
            grad_norm=1.0,
            tokens=1,
            loss_scale=1.0,
            is_updated=is_finite,
            is_finite=is_finite,
            should_stop=False,
        )

    def evaluate(self):
        self.evaluated.append(self.taken[-1][0])
        return {"loss": 1.0}

    def note(self, iteration, consumed):
        return Progress(iteration, consumed)


@pytest.mark.parametrize("begun", [0, 3])
def test_a_step_takes_the_rate_that_the_steps_before_it_have_reached(begun):
    """As Megatron does: the first step of a warm-up from 0 has rate 0; a resumed run goes on."""
    run = Run(begun=begun)
    end = run.run()
    rates = [0.0, 0.5, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    expected = [(n + 1, 4 * n, pytest.approx(rate)) for n, rate in enumerate(rates)]
    assert run.taken == expected[begun:]
    assert (end.iteration, end.consumed_samples) == (STEPS, 4 * STEPS)
    assert run.optimizer.param_groups[0]["weight_decay"] == TrainOptions(lr=1.0).weight_decay


def test_saves_come_at_the_interval_and_at_the_end():
    run = Run(save_interval=3)
    run.run()
    assert run.saves.saved == [(3, 12), (6, 24), (8, 32)] and run.saves.is_finished
    last = Run()
    last.run()
    assert last.saves.saved == [(8, 32)]


def test_evaluation_comes_at_its_interval():
    run = Run(eval_interval=3, eval_iters=1)
    run.run()
    assert run.evaluated == [3, 6]
    none = Run(eval_interval=3, eval_iters=0)
    none.run()
    assert none.evaluated == []


def test_only_steps_in_a_row_that_are_no_numbers_end_a_run():
    run = Run(bad={1, 2, 4, 5, 7}, max_nan_iterations=3)
    assert run.run().iteration == STEPS
    ended = Run(bad={2, 3, 4, 5}, max_nan_iterations=3)
    with pytest.raises(RuntimeError, match="in 3 steps"):
        ended.run()
    assert ended.taken[-1][0] == 4 and ended.saves.is_finished


def test_a_run_that_is_done_takes_no_step():
    run = Run(begun=STEPS)
    assert run.run().iteration == STEPS and run.taken == [] and run.saves.saved == []
