"""The store listens only on the requested address; the environment of a rank leads to it."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from mindspeed.config import ConfigError
from mindspeed.launch import LOOPBACK, Rendezvous, loopback_interface, rank_environment
from mindspeed.launch.rendezvous import StoreLost
from tests.sockets import descendants, listening_addresses


@pytest.mark.parametrize("serve", [Rendezvous.serve, Rendezvous.serve_apart])
def test_clients_reach_the_store_on_loopback(serve: Callable[[Rendezvous], None]) -> None:
    with Rendezvous() as rendezvous:
        serve(rendezvous)
        first, second = (
            dist.TCPStore(
                "127.0.0.1", rendezvous.port, is_master=False, timeout=timedelta(seconds=240)
            )
            for _ in range(2)
        )
        first.set("key", "value")
        assert second.get("key") == b"value"


def test_only_loopback_listens_unless_asked() -> None:
    with Rendezvous() as ours, Rendezvous("0.0.0.0") as asked:
        ours.serve()
        asked.serve()
        found = listening_addresses()
    assert ("127.0.0.1", ours.port) in found
    assert ("0.0.0.0", asked.port) in found
    assert not {("0.0.0.0", ours.port), ("::", ours.port)} & found


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot listen on 192.0.2.1"):
        Rendezvous("192.0.2.1")


def test_the_store_outlives_signals_that_all_processes_get() -> None:
    with Rendezvous() as rendezvous:
        before = descendants(os.getpid())  # such as the server of ranks, which later tests need
        rendezvous.serve_apart()
        (server,) = descendants(os.getpid()) - before
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(server, number)
        wait = timedelta(seconds=240)
        store = dist.TCPStore("127.0.0.1", rendezvous.port, is_master=False, timeout=wait)
        store.set("key", "value")
        rendezvous.check()
        assert store.get("key") == b"value"


def test_a_store_that_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Rendezvous() as rendezvous:
        rendezvous.check()
        rendezvous.serve_apart()
        with pytest.raises(StoreLost, match="ended with exit code 1"):
            for _ in range(2000):
                rendezvous.check()
                time.sleep(0.05)


def test_the_environment_holds_rank_and_address() -> None:
    found = rank_environment(1, 4, host=LOOPBACK, port=1234, inherited={"HOME": "/h", "RANK": "9"})
    assert found["HOME"] == "/h"
    assert [found[name] for name in ("RANK", "LOCAL_RANK")] == ["1", "1"]
    assert [found[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["4", "4"]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "1234")


def test_the_interface_is_loopback() -> None:
    interface = loopback_interface()
    assert interface is not None
    assert socket.if_nametoindex(interface) > 0
    found = rank_environment(0, 1, host=LOOPBACK, port=1, inherited={})
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == interface


def test_variables_of_the_user_are_kept() -> None:
    chosen = {"GLOO_SOCKET_IFNAME": "eth7", "OMP_NUM_THREADS": "3"}
    found = rank_environment(0, 2, host=LOOPBACK, port=1, inherited=chosen)
    assert {name: found[name] for name in chosen} == chosen


def test_another_address_frees_the_interfaces() -> None:
    found = rank_environment(0, 2, host="0.0.0.0", port=1, inherited={})
    assert "GLOO_SOCKET_IFNAME" not in found
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert rank_environment(0, 2, host="10.0.0.7", port=1)["MASTER_ADDR"] == "10.0.0.7"
