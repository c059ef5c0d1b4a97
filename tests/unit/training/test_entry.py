"""One process as a rank: signals, exit codes, one line for an error, no thread left behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mindspeed.config import ConfigError, RankConfigError
from mindspeed.training.entry import (
    CONFIG_ERROR,
    LAUNCHED,
    POLL_SECONDS,
    Stopped,
    StopRequest,
    exit_on_config_error,
    run_rank,
)
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("number", "usual"), [(signal.SIGTERM, []), (signal.SIGINT, ["usual", "usual"])]
)
def test_the_first_signal_is_recorded(number: signal.Signals, usual: list[str]) -> None:
    """A second Ctrl-C works; SIGTERM may be repeated, as by a launcher that passes it on."""
    came: list[str] = []
    before = signal.signal(number, lambda *arguments: came.append("usual"))
    try:
        with StopRequest() as request:
            assert not request.is_set()
            os.kill(os.getpid(), number)
            assert request.is_set() and request.signal == number and not came
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert came == usual and request.signal == number
    finally:
        signal.signal(number, before)


def _fail_with_groups(how: str) -> tuple[int | str, list[str]]:
    """End as one of two ranks with Megatron's groups, in cycles and frames; return what is left."""
    import torch
    from megatron.core import parallel_state

    class Model:
        """Holds itself and a group, as modules with hooks do."""

    def train() -> None:
        parallel_state.initialize_model_parallel(2)
        model: Any = Model()
        model.itself, model.group = model, torch.distributed.new_group()
        torch.distributed.all_reduce(torch.ones(1), group=model.group)
        try:
            raise OSError("damaged")
        except OSError as error:
            if how == "wrong":
                raise ConfigError(f"cannot be loaded ({error})") from None
            if how == "stopped":
                raise Stopped(signal.SIGTERM, 3) from None

    code: int | str
    try:
        code = run_rank(train)
    except ConfigError as error:
        code = str(error)
    left = _network_threads()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), **ALONE)
    return code, left


def _network_threads() -> list[str]:
    """Return the threads of gloo; one that has been joined is listed for a moment still."""
    end = time.monotonic() + 10
    while True:
        names = []
        for file in Path("/proc/self/task").glob("*/comm"):
            with suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
                names.append(file.read_text().strip())
        left = [name for name in names if "runloop" in name]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.01)


ALONE = {"rank": 0, "world_size": 1}
"""For the end of the test's rank, which leaves a group."""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
@pytest.mark.parametrize(("how", "code"), [("wrong", 2), ("stopped", 143), ("well", 0)])
def test_no_thread_of_a_group_is_left(how: str, code: int) -> None:
    """One that is there when the interpreter ends aborts it now and then."""
    first, second = run_ranks(_fail_with_groups, 2, how)
    assert first == ("cannot be loaded (damaged)" if how == "wrong" else code, [])
    assert second == (code, [])


@pytest.mark.parametrize("rank", ["0", "3"])
def test_an_error_that_one_rank_knows_is_reported_by_it(
    rank: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)

    def train() -> None:
        raise RankConfigError("this stage returned two tensors: declare two")

    assert run_rank(train) == CONFIG_ERROR
    with pytest.raises(SystemExit) as exit, exit_on_config_error():
        train()
    assert exit.value.code == CONFIG_ERROR
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    for line in said:
        assert line.endswith("error: this stage returned two tensors: declare two")


# A rank that trains until it is asked to stop, and the launcher that started it.
RANK = """
import os, sys, time
from pathlib import Path
from mindspeed.training.entry import run_rank
from mindspeed.training.entry import StopRequest

def train():
    with StopRequest() as request:
        Path("rank").write_text(str(os.getpid()))
        while not request.is_set() and not Path("go").exists():
            time.sleep(0.05)
        Path("ended.new").write_text("asked to stop" if request.is_set() else "done")
        os.rename("ended.new", "ended")

sys.exit(run_rank(train))
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, 'rank.py'])"


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_rank_stops_when_its_launcher_is_killed(tmp_path: Path, is_launched: bool) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    marks = {LAUNCHED: "True"} if is_launched else {}
    with (tmp_path / "said").open("w") as said:
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != LAUNCHED} | marks,
            stdout=said,
        )
    _wait_for(tmp_path / "rank")
    launcher.kill()
    launcher.wait()
    if not is_launched:
        time.sleep(2 * POLL_SECONDS)
        (tmp_path / "go").touch()
    _wait_for(tmp_path / "ended")
    expected = f"the launcher (process {launcher.pid}) has ended: stopping\n"
    assert (tmp_path / "ended").read_text() == ("asked to stop" if is_launched else "done")
    assert (tmp_path / "said").read_text() == (expected if is_launched else "")


def _wait_for(file: Path) -> None:
    end = time.monotonic() + 120
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
