"""What a rank finds in its environment."""

import socket

from mindspeed.launch import LOOPBACK, rank_environment
from mindspeed.launch.environment import loopback_interface


def test_a_rank_knows_its_place() -> None:
    found = rank_environment(1, 4, host=LOOPBACK, port=1234, inherited={"HOME": "/h", "RANK": "9"})
    assert found["HOME"] == "/h"
    assert [found[name] for name in ("RANK", "LOCAL_RANK")] == ["1", "1"]
    assert [found[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["4", "4"]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "1234")


def test_the_interface_is_the_loopback_one() -> None:
    interface = loopback_interface()
    assert interface is not None
    assert socket.if_nametoindex(interface) > 0
    found = rank_environment(0, 1, host=LOOPBACK, port=1, inherited={})
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == interface


def test_the_users_own_choices_stay() -> None:
    chosen = {"GLOO_SOCKET_IFNAME": "eth7", "OMP_NUM_THREADS": "3"}
    found = rank_environment(0, 2, host=LOOPBACK, port=1, inherited=chosen)
    assert {name: found[name] for name in chosen} == chosen


def test_another_address_frees_the_interfaces() -> None:
    found = rank_environment(0, 2, host="0.0.0.0", port=1, inherited={})
    assert "GLOO_SOCKET_IFNAME" not in found
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert rank_environment(0, 2, host="10.0.0.7", port=1)["MASTER_ADDR"] == "10.0.0.7"
