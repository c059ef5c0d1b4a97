"""Functions as ranks: values, failures, time-outs and fresh processes."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, run_ranks
from tests.sockets import running

_seen = []


def _sum_of_ranks(offset: int) -> torch.Tensor:
    total = torch.tensor([float(offset + dist.get_rank())])
    dist.all_reduce(total)
    return total


def _place() -> tuple[list[str], str, int]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "EXTRA")
    _seen.append(1)
    return [os.environ[name] for name in names], dist.get_backend(), len(_seen)


def _importers() -> tuple[int, int, bool]:
    from tests.preload import IMPORTED_BY  # only here: it puts the adaptor into the process

    return os.getpid(), IMPORTED_BY, "mindspeed.megatron_adaptor" in sys.modules


def _raise_in(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"boom in {rank}")
    dist.barrier()


def _kill_in(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _sleep_in(rank: int, folder: str) -> None:
    with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
        file.write(str(os.getpid()))
    if dist.get_rank() == rank:
        time.sleep(1000)
    dist.barrier()


def _fork_and_die(pid_file: str) -> None:
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            time.sleep(600)  # with every descriptor of the rank
            os._exit(0)
        with open(pid_file, "w") as file:
            file.write(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_values_come_back_by_rank() -> None:
    assert [value.item() for value in run_ranks(_sum_of_ranks, 3, 10)] == [33.0] * 3


def test_each_rank_knows_its_place_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTRA", "from the test")
    for _ in range(2):
        expected = [([r, r, "2", "2", "from the test"], "gloo", 1) for r in ("0", "1")]
        assert run_ranks(_place, 2) == expected


def test_ranks_start_from_the_preloaded_server() -> None:
    (first, server, adapted), (second, same_server, _) = run_ranks(_importers, 2)
    assert server == same_server and server not in (first, second, os.getpid())
    assert adapted


def test_the_first_failing_rank_is_raised_with_its_traceback() -> None:
    with pytest.raises(RankFailed, match="rank 2 of 3 ended with exit code 1") as caught:
        run_ranks(_raise_in, 3, 2)
    assert caught.value.rank == 2
    assert "ValueError: boom in 2" in caught.value.traceback
    assert "in _raise_in" in caught.value.traceback


def test_a_killed_rank_is_named_with_its_last_output() -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 was killed by SIGKILL") as caught:
        run_ranks(_kill_in, 2, 1)
    assert caught.value.rank == 1
    assert caught.value.traceback == "last words"


def test_a_killed_rank_is_missed_although_its_child_lives(tmp_path) -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 was killed by SIGKILL"):
        run_ranks(_fork_and_die, 2, str(tmp_path / "child"))
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_a_hang_shows_where_each_rank_is_and_leaves_nothing(tmp_path) -> None:
    run_ranks(_sum_of_ranks, 1, 0)  # so that the time-out does not cover the server's imports
    for seconds in (2, 10, 50):
        with pytest.raises(RankFailed) as caught:
            run_ranks(_sleep_in, 2, 1, str(tmp_path), timeout=seconds)
        if caught.value.traceback.count("in _sleep_in") == 2:
            break  # else the machine was too busy for both ranks to get there
    assert "ranks 0, 1 of 2 still running" in str(caught.value)
    zero, one = caught.value.traceback.split("rank 1:")
    assert caught.value.rank == 0
    assert "in barrier" in zero and "in _sleep_in" in one
    assert not any(running(int(file.read_text())) for file in tmp_path.iterdir())
