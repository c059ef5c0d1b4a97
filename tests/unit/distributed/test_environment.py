"""Rank and world size come from the launcher's variables, and from nothing without a launcher."""

import pytest

from mindspeed.distributed import environment

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def found():
    return (
        environment.rank(),
        environment.world_size(),
        environment.local_rank(),
        environment.local_world_size(),
    )


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, (0, 1, 0, 1)),
        (dict(zip(NAMES, "9 16 1 8".split())), (9, 16, 1, 8)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 0, 4)),
        (dict.fromkeys(NAMES, ""), (0, 1, 0, 1)),
    ],
    ids=str,
)
def test_values(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert found() == expected


@pytest.mark.parametrize(
    "variables, is_first, is_local_first",
    [
        ({}, True, True),
        ({"RANK": "1"}, False, False),
        ({"RANK": "8", "LOCAL_RANK": "0"}, False, True),
        ({"RANK": "1", "LOCAL_RANK": "1"}, False, False),
    ],
    ids=str,
)
def test_first_ranks(monkeypatch, variables, is_first, is_local_first):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.is_rank_zero() is is_first
    assert environment.is_local_rank_zero() is is_local_first


def test_a_value_that_is_not_an_integer_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(RuntimeError, match="WORLD_SIZE=two is not an integer: .*unset WORLD_SIZE"):
        environment.world_size()
