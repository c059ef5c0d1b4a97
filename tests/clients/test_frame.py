"""The verdicts of the frame, and what its table must hold."""

from pathlib import Path

import pytest

from tests.clients import bridges
from tests.clients.cases import Case, OwnFailure, judge
from tests.clients.table import CLIENTS
from tests.clients.worker import run

OWN = [OwnFailure("deepseek*", "*", "no such field", "client.py names a field that is gone")]


def case(model="deepseek_v3", error=None):
    def check(folder: Path) -> str:
        assert folder.is_dir() and not list(folder.iterdir())
        if error is not None:
            raise error
        return "logits 1e-7"

    return Case(model, "TP 2", check)


def test_passed_and_failed():
    outcome = run("some", "0.16.1", case("llama"), OWN)
    assert (outcome.verdict, outcome.detail, outcome.is_fine) == ("passed", "logits 1e-7", True)
    outcome = run("some", "0.16.1", case("llama", ValueError("no such field")), OWN)
    assert (outcome.verdict, outcome.is_fine) == ("failed", False)
    assert outcome.detail == "ValueError: no such field"


def test_a_failure_is_the_clients_own_at_its_place_and_with_its_words():
    outcome = run("some", "0.16.1", case(error=TypeError("no such field: x")), OWN)
    assert (outcome.verdict, outcome.is_fine) == ("client", True)
    assert outcome.detail == "client.py names a field that is gone"
    assert run("some", "0.16.1", case(error=TypeError("another")), OWN).verdict == "failed"
    elsewhere = [OwnFailure("*", "*", "no such field", "gone", core="0.12.*")]
    verdict, _ = judge(case(), "0.16.1", "no such field", elsewhere)
    assert verdict == "failed"


def test_a_listed_failure_that_passes_is_reported_as_stale():
    outcome = run("some", "0.16.1", case(), OWN)
    assert (outcome.verdict, outcome.is_fine) == ("stale", False)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_versions_are_pinned_and_torch_is_not_among_them(client):
    assert all("==" in each for each in client.requirements)
    assert not [
        each for each in client.requirements if each.startswith(("torch=", "megatron-core"))
    ]
    page = Path("docs/clients.md").read_text()
    assert f"| {client.name} | {client.requirements[0].partition('==')[2]} |" in page


def test_what_differs_is_found():
    import torch

    weights = {"a": torch.zeros(2), "b": torch.ones(2)}
    assert bridges._same(dict(weights), weights, 0.0, "exported") == 0.0
    with pytest.raises(AssertionError, match="exported: b differs by 1.2e-07"):
        bridges._same(weights | {"b": torch.ones(2) - 1e-7}, weights, 0.0, "exported")
    with pytest.raises(AssertionError, match=r"only one side has \['b'\]"):
        bridges._same({"a": torch.zeros(2)}, weights, 0.0, "exported")
    with pytest.raises(AssertionError, match=r"a is \(1,\)"):
        bridges._same(weights | {"a": torch.zeros(1)}, weights, 0.0, "exported")
