"""Which ranks wait for a debugger, and what is said when they cannot."""

import socket
import sys

import pytest

from mindspeed.config import ConfigError
from mindspeed.debug import attach_if_asked, setup_debugpy


@pytest.fixture
def rank_1_of_4(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    for name in ("MINDSPEED_DEBUG_RANKS", "MINDSPEED_DEBUG_HOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def taken_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.usefixtures("rank_1_of_4")
def test_unselected_ranks_go_on_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attach_if_asked()
    monkeypatch.setenv("MINDSPEED_DEBUG_RANKS", "0, 2")
    attach_if_asked()
    setup_debugpy()
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("rank_1_of_4")
@pytest.mark.parametrize("given", ["one", "0,", "0-2", "1.5", "0;1"])
def test_ranks_that_are_no_numbers_are_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_DEBUG_RANKS", given)
    with pytest.raises(ConfigError, match=f"MINDSPEED_DEBUG_RANKS={given}: give rank numbers"):
        attach_if_asked()


@pytest.mark.usefixtures("rank_1_of_4")
@pytest.mark.parametrize(("given", "outside"), [("0,4", 4), ("-1", -1)])
def test_ranks_that_do_not_exist_are_refused(
    given: str, outside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINDSPEED_DEBUG_RANKS", given)
    with pytest.raises(ConfigError, match=f"no rank {outside}, this job has ranks 0 to 3"):
        attach_if_asked()


@pytest.mark.usefixtures("rank_1_of_4")
def test_a_port_in_use_is_named(taken_port: int) -> None:
    with pytest.raises(RuntimeError, match=f"port {taken_port} of 127.0.0.1.*in use"):
        setup_debugpy(base_port=taken_port - 1)


@pytest.mark.usefixtures("rank_1_of_4")
def test_a_port_beyond_the_last_is_refused() -> None:
    with pytest.raises(ConfigError, match="port 65536 is above 65535"):
        setup_debugpy(base_port=65535)


@pytest.mark.usefixtures("rank_1_of_4")
def test_a_missing_debugpy_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "debugpy", None)  # what import finds when it is not installed
    with pytest.raises(RuntimeError, match="pip install debugpy"):
        setup_debugpy()


@pytest.mark.usefixtures("rank_1_of_4")
def test_listening_beyond_loopback_warns(
    taken_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MINDSPEED_DEBUG_HOST", "0.0.0.0")
    with pytest.raises(RuntimeError, match="of 0.0.0.0"):  # the port is taken, so nothing opens
        setup_debugpy(base_port=taken_port - 1)
    assert "anyone who reaches this port can run code" in caplog.text
