"""The store answers on the address asked for, and only there."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from mindspeed.config import ConfigError
from mindspeed.launch import Rendezvous
from tests.sockets import listening_addresses


def test_clients_reach_the_store_on_loopback() -> None:
    with Rendezvous() as rendezvous:
        rendezvous.serve()
        first, second = (
            dist.TCPStore(
                "127.0.0.1", rendezvous.port, is_master=False, timeout=timedelta(seconds=10)
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
