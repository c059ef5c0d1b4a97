"""`mindspeed run` as a user sees it: output, exit codes, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sockets import descendants, listening_addresses, running

PATIENCE = 240.0
"""Seconds for what takes one or two on an idle machine."""

# Every script first leaves the pid of its rank, and of a child of that rank, in the working folder.
_PREAMBLE = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
child = subprocess.Popen(["sleep", "1000"]) if "with-child" in sys.argv else None
for name, pid in ((f"{rank}.pid", os.getpid()), (f"{rank}.child", child and child.pid)):
    if pid:
        open(name + ".new", "w").write(str(pid))
        os.rename(name + ".new", name)
"""

# A process that ends without leaving its group is aborted by torch now and then.
_GLOO = """
import atexit, torch, torch.distributed as dist
dist.init_process_group()
atexit.register(dist.destroy_process_group)
"""


def _start(
    folder: Path,
    body: str,
    *options: str,
    arguments: tuple[str, ...] = (),
    under: tuple[str, ...] = (),
) -> "subprocess.Popen[str]":
    (folder / "script.py").write_text(_PREAMBLE + body)
    command = [sys.executable, "-m", "mindspeed", "run", *options, "script.py", *arguments]
    return subprocess.Popen(
        [*under, *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test session in the background of a shell ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _run(
    folder: Path, body: str, *options: str, arguments: tuple[str, ...] = ()
) -> tuple[int, str, str]:
    process = _start(folder, body, *options, arguments=arguments)
    out, err = process.communicate(timeout=PATIENCE)
    _until_nothing_is_left(folder)
    return process.returncode, out, err


def _pids(folder: Path) -> list[int]:
    return [
        int(file.read_text()) for ending in ("pid", "child") for file in folder.glob(f"*.{ending}")
    ]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def _until_nothing_is_left(folder: Path) -> None:
    """Wait for the end of all ranks and their children, which sleep for longer than this waits.

    A process that was killed is there for a moment still, and its killer may end before it does.
    """
    _until(lambda: not any(map(running, _pids(folder))))


def test_ranks_meet_and_rank_0_is_shown_as_it_is(tmp_path: Path) -> None:
    body = _GLOO + "total = torch.ones(2); dist.all_reduce(total); print(rank, total.tolist())"
    code, out, err = _run(tmp_path, body, "--nproc_per_node", "2")
    assert (code, out) == (0, "0 [2.0, 2.0]\n"), err


def test_all_ranks_are_shown_on_demand_with_their_arguments(tmp_path: Path) -> None:
    body = "print(rank, sys.argv[1:])"
    options = ("--nproc-per-node", "2", "--all-ranks")
    code, out, _ = _run(tmp_path, body, *options, arguments=("--nproc", "7", "-m"))
    assert code == 0
    assert sorted(out.splitlines()) == [f"[rank {r}] {r} ['--nproc', '7', '-m']" for r in (0, 1)]


def test_a_module_is_run_with_m(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mindspeed", "run", "-m", "json.tool", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "json.tool" in done.stdout


def test_a_rank_that_raises_is_named_and_the_others_leave(tmp_path: Path) -> None:
    body = _GLOO + "dist.barrier()\nif rank == 1: raise ValueError('boom')\ndist.barrier()"
    code, _, err = _run(tmp_path, body, "--nproc", "3")
    assert code == 1
    assert err.endswith("mindspeed run: rank 1 of 3 ended with exit code 1\n")
    assert "[rank 1] ValueError: boom\n" in err
    assert "[rank 2]" not in err


def test_a_killed_rank_is_named_and_its_children_leave_too(tmp_path: Path) -> None:
    body = "if rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(1000)"
    code, _, err = _run(tmp_path, body, "--nproc", "2", arguments=("with-child",))
    assert code == 1
    assert "mindspeed run: rank 1 of 2 was killed by SIGSEGV\n" in err
    assert len(_pids(tmp_path)) == 4


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    body = (
        "if rank == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN); open('deaf', 'w')\n"
        "else:\n"
        "    while not os.path.exists('deaf'): time.sleep(0.01)\n"
        "    os._exit(3)\n"
        "time.sleep(1000)"
    )
    code, _, err = _run(tmp_path, body, "--nproc", "2")
    assert (code, err) == (1, "mindspeed run: rank 1 of 2 ended with exit code 3\n")


def test_a_hang_names_the_ranks_and_shows_where_they_are(tmp_path: Path) -> None:
    body = "def waiting():\n    time.sleep(1000)\nif rank > 0: waiting()"
    where = f"line {_PREAMBLE.count(chr(10)) + 2} in waiting"
    for seconds in (4, 16, 64):
        code, _, err = _run(tmp_path, body, "--nproc", "3", "--timeout", str(seconds))
        if err.count(where) == 2:
            break  # else the machine was too busy for all ranks to get there
    assert code == 1
    assert f"time-out after {seconds} s with ranks 1, 2 of 3 still running" in err
    assert all(f"[rank {rank}]   File" in err for rank in (1, 2)) and err.count(where) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which process is suspended")
def test_only_a_suspended_rank_is_named(tmp_path: Path) -> None:
    body = _GLOO + (
        "from datetime import timedelta\n"
        "group = dist.new_group()\n"
        "dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)  # once it is there\n"
        "dist.barrier()\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "dist.all_reduce(torch.ones(1), group=group)"
    )
    code, _, err = _run(tmp_path, body, "--nproc", "3")
    assert code == 1
    assert err.splitlines()[-1] == (
        "mindspeed run: rank 1 of 3 did not answer within the time-out of the others and is "
        "suspended (SIGSTOP or a debugger)"
    )


def test_a_rank_that_is_asked_to_stop_ends_all_with_its_code(tmp_path: Path) -> None:
    code, _, err = _run(tmp_path, "sys.exit(143)", "--nproc", "2")
    assert code == 143
    assert err.replace("rank 1", "rank 0") == (  # whichever ends first
        "mindspeed run: rank 0 of 2 stopped before its last step (exit code 143: SIGTERM)\n"
    )


def test_a_configuration_error_is_printed_once(tmp_path: Path) -> None:
    body = (
        "while not os.path.exists('0.pid'): time.sleep(0.01)\n"
        "time.sleep(0.3 * (rank == 0)); sys.exit(sys.stderr.write('no such flag\\n') and 2)"
    )
    code, out, err = _run(tmp_path, body, "--nproc", "3")
    assert (code, out, err) == (2, "", "no such flag\n")


def test_a_configuration_error_of_one_rank_is_printed_too(tmp_path: Path) -> None:
    body = "if rank == 1: sys.exit(sys.stderr.write('bad on 1\\n') and 2)"
    assert _run(tmp_path, body, "--nproc", "2") == (2, "", "bad on 1\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_launcher_takes_its_ranks_along(
    tmp_path: Path, number: int, code: int
) -> None:
    process = _start(tmp_path, "time.sleep(1000)", "--nproc", "2", arguments=("with-child",))
    _until(lambda: len(_pids(tmp_path)) == 4)
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert "all ranks have ended" in err
    _until_nothing_is_left(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children of a killed parent")
def test_a_launcher_killed_outright_leaves_nothing(tmp_path: Path) -> None:
    process = _start(tmp_path, "time.sleep(1000)", "--nproc", "2")
    _until(lambda: len(_pids(tmp_path)) == 2)
    family = descendants(process.pid)
    assert set(_pids(tmp_path)) < family
    process.kill()
    _until_nothing_is_left(tmp_path)
    # The process that serves the store ends as soon as it has loaded torch.
    _until(lambda: not any(running(pid) for pid in family - {process.pid}))
    process.communicate(timeout=PATIENCE)


def test_nothing_of_the_job_listens_beyond_loopback(tmp_path: Path) -> None:
    body = _GLOO + (
        "dist.new_group([0, 1]); dist.barrier(); open(f'{rank}.ready', 'w')\n"
        "while not os.path.exists('go'): time.sleep(0.05)"
    )
    process = _start(tmp_path, body, "--nproc", "2")
    _until(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
    addresses = {address for address, _ in listening_addresses(descendants(process.pid))}
    (tmp_path / "go").touch()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert addresses == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc", "0", "script.py"], "--nproc 0: give the number of ranks"),
        (["--timeout", "-1", "script.py"], "--timeout -1: give a number of seconds"),
        (["nowhere.py"], "nowhere.py does not exist"),
        (["."], ". is a folder"),
        (["-m", "no_such_package.module"], "no module named no_such_package"),
        ([], "nothing to run"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from mindspeed.cli.main import main

    assert main(["run", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_an_address_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    code, _, err = _run(tmp_path, "", "--host", "192.0.2.1")
    assert code == 2
    assert "cannot listen on 192.0.2.1" in err and len(err.splitlines()) == 1
    assert os.listdir(tmp_path) == ["script.py"]


def test_ranks_have_the_time_they_need_to_save(tmp_path: Path) -> None:
    body = (
        "def save(*_):\n"
        "    while not os.path.exists('go') and time.monotonic() < end: time.sleep(0.05)\n"
        "    open('saved', 'w'); sys.exit(0)\n"
        f"end = time.monotonic() + {PATIENCE}\n"
        "signal.signal(signal.SIGTERM, save); open('ready', 'w'); time.sleep(1000)"
    )
    process = _start(tmp_path, body)
    _until(lambda: (tmp_path / "ready").exists())
    process.send_signal(signal.SIGINT)
    said = process.stderr.readline()  # type: ignore[union-attr]
    assert "waiting for rank 0 to end; a second Ctrl-C kills" in said
    (tmp_path / "go").touch()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and (tmp_path / "saved").exists()


def test_a_second_interrupt_does_not_wait_for_the_ranks(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); open('deaf', 'w'); time.sleep(1000)"
    process = _start(tmp_path, body)
    _until(lambda: (tmp_path / "deaf").exists())
    started = time.monotonic()
    while process.poll() is None and time.monotonic() - started < PATIENCE:
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    process.communicate(timeout=PATIENCE)
    # One more may hit the interpreter itself as it leaves.
    assert process.returncode in (130, -signal.SIGINT)
    _until_nothing_is_left(tmp_path)


def test_nohup_is_respected(tmp_path: Path) -> None:
    body = "while not os.path.exists('go'): time.sleep(0.05)"
    process = _start(tmp_path, body, under=("nohup",))
    _until(lambda: len(_pids(tmp_path)) == 1)
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
