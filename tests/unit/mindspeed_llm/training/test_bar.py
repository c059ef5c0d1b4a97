"""The bar: on a terminal, and only there."""

import logging
import os
import pty
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from mindspeed_llm.training.bar import StepBar
from mindspeed_llm.training.step import StepResult

RESULT = StepResult(
    losses={"lm loss": 1.23456},
    grad_norm=1.0,
    tokens=100,
    loss_scale=1.0,
    is_updated=True,
    is_finite=True,
    is_asked_to_stop=False,
)


def _run(bar: StepBar) -> None:
    bar.begin(1)
    for iteration in (2, 3):
        logging.getLogger("bar").warning("line %d", iteration)
        bar.add(iteration, RESULT)
    bar.end()


END = "<the end>"


def _read(master: int, stream: TextIO) -> str:
    """Give all that was written; one read may give a part of it only."""
    stream.write(END)
    stream.flush()
    shown = b""
    while END.encode() not in shown:
        shown += os.read(master, 1 << 16)
    return shown.decode()


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Make stdout and stderr a terminal, to which logging writes; give what was shown."""
    master, slave = pty.openpty()
    stream = os.fdopen(slave, "w")
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(sys, "stdout", stream)
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "100")
        yield lambda: _read(master, stream)
    assert handler.stream is stream, "logging was not given back its stream"
    logging.getLogger().removeHandler(handler)
    stream.close()
    os.close(master)


def test_a_terminal_shows_step_loss_speed_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as read:
        _run(StepBar(4, is_writer=True))
        shown = read()
    assert "3/4" in shown and "loss 1.2346" in shown and "tokens/s" in shown
    assert "line 2" in shown and "line 3" in shown


def test_other_ranks_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as read:
        _run(StepBar(4, is_writer=False))
        assert "tokens/s" not in read()


def test_without_a_terminal_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    _run(StepBar(4, is_writer=True))
    assert "tokens/s" not in "".join(capfd.readouterr())
