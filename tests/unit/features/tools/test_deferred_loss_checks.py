"""Losses that are checked once a step lead to the same decisions as those checked at once."""

from itertools import chain

import pytest
import torch
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, RerunStateMachine

from mindspeed.features.tools.deferred_loss_checks import (
    wrap_should_run_forward_backward,
    wrap_validate_result,
)

NAN, INF = float("nan"), float("inf")


class Deferred(RerunStateMachine):
    validate_result = wrap_validate_result(RerunStateMachine.validate_result)
    should_run_forward_backward = wrap_should_run_forward_backward(
        RerunStateMachine.should_run_forward_backward
    )


@pytest.fixture(autouse=True)
def one_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def run(kind, mode, steps):
    """Return what happens: a number for each run of a step's passes, or the error."""
    rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE = machine = kind(mode=mode)
    events = []
    data = RerunDataIterator(chain.from_iterable(steps))
    for number, losses in enumerate(steps):
        try:
            while machine.should_run_forward_backward(data):
                events.append(number)
                for _ in losses:
                    result = torch.tensor(next(data))
                    for name in ("isnan", "isinf"):
                        machine.validate_result(
                            result, rejection_func=getattr(torch, name), message=name, fatal=True
                        )
                    result /= len(losses)  # as Megatron's schedules do
        except RuntimeError as error:
            events.append(str(error).partition("iteration")[2])
            break
        stop, _, code = machine.should_checkpoint_and_exit()
        if stop:
            events.append(code)
            break
    return events


@pytest.mark.parametrize("mode", [RerunMode.DISABLED, RerunMode.VALIDATE_RESULTS])
@pytest.mark.parametrize("bad", [None, (1, 0, NAN), (2, 1, INF), (2, 2, NAN), (0, 1, NAN)])
def test_the_same_decisions(mode, bad):
    steps = [[1.0, 2.0, 3.0] for _ in range(4)]
    if bad is not None:
        step, place, value = bad
        steps[step][place] = value
    found = run(Deferred, mode, steps)
    assert found == run(RerunStateMachine, mode, steps)
    assert found != [0, 1, 2, 3] or bad is None or (mode != RerunMode.DISABLED and bad[0] == 0)


def test_the_host_looks_once_a_step(monkeypatch):
    looks, read = [], torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda x: looks.append(1) or read(x))
    assert run(Deferred, RerunMode.VALIDATE_RESULTS, [[1.0] * 8] * 3) == [0, 1, 2]
    assert len(looks) == 3


def test_evaluations_are_checked_at_once():
    machine = Deferred(mode=RerunMode.DISABLED)
    loss = torch.tensor(NAN)
    with torch.no_grad(), pytest.raises(RuntimeError, match="Unexpected result nan"):
        machine.validate_result(loss, rejection_func=torch.isnan, message="nan")
