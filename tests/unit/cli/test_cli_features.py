"""`mindspeed features` for people and for programs."""

import json

import pytest

from mindspeed.cli.main import main
from mindspeed.compat.table import TABLE
from mindspeed.features.registry import registry
from mindspeed.ops.dispatch import Impl, known_ops

KEYS = [
    "name",
    "title",
    "group",
    "level",
    "flags",
    "requires",
    "conflicts",
    "devices",
    "on",
    "why",
    "docs",
]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("MINDSPEED_DEVICE", "cpu")


def listed(capsys, *words):
    assert main(["features", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    return {feature["name"]: feature for feature in found["features"]}


def test_json_has_every_feature_with_the_same_keys(capsys):
    found = listed(capsys)
    assert found.keys() == {feature.name for feature in registry()}
    assert all(list(feature) == KEYS for feature in found.values())


def test_compat_entries_are_not_listed(capsys):
    assert listed(capsys).keys().isdisjoint(entry.name for entry in TABLE)


def test_json_of_some_features(capsys):
    found = listed(capsys)
    assert found["fused_swiglu"] == {
        "name": "fused_swiglu",
        "title": "Fused SwiGLU",
        "group": "Fusion",
        "level": 1,
        "flags": ["--use-fused-swiglu"],
        "requires": [],
        "conflicts": {},
        "devices": ["cpu", "cuda", "npu"],
        "on": False,
        "why": "--use-fused-swiglu is not set",
        "docs": "docs/features/fused_swiglu.md",
    }
    assert found["weight_gradient_fusion"]["on"] is True
    assert found["overlap_param_gather"]["requires"] == ["distributed_optimizer", "async_ddp"]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_level(capsys, level):
    found = listed(capsys, "--level", str(level))
    assert {feature["level"] for feature in found.values()} == set(range(level + 1))


def test_table_fits_and_names_everything(capsys):
    assert main(["features"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    words = text.split()
    for feature in registry():
        assert feature.name in words
        assert all(flag in words for flag in feature.flags)
    for group in {feature.group for feature in registry()}:
        assert f"\n{group}" in text


def operators(capsys):
    assert main(["features", "--json"]) == 0
    return {op["name"]: op for op in json.loads(capsys.readouterr().out)["ops"]}


def test_every_operator_lists_what_runs_it_here(capsys):
    found = operators(capsys)
    assert found.keys() == known_ops().keys() >= {"rms_norm", "swiglu"}
    assert {op["implementation"] for op in found.values()} == {"reference"}
    assert "npu is for npu" in found["rms_norm"]["why"]
    assert main(["features"]) == 0
    assert set(found) < set(capsys.readouterr().out.split())


def test_a_missing_package_is_why_a_kernel_is_passed_over(capsys, monkeypatch):
    impl = Impl("kernel", "nowhere:kernel", device="cpu", needs=("no_such_package",))
    monkeypatch.setattr(known_ops()["rms_norm"], "impls", (impl,))
    assert operators(capsys)["rms_norm"] == {
        "name": "rms_norm",
        "implementation": "reference",
        "why": "kernel: the package no_such_package is not installed",
    }


def test_a_forced_implementation_is_listed_or_refused(capsys, monkeypatch):
    monkeypatch.setenv("MINDSPEED_OPS", "swiglu=reference")
    assert operators(capsys)["swiglu"]["implementation"] == "reference"
    monkeypatch.setenv("MINDSPEED_OPS", "swiglu=npu")
    assert main(["features"]) == 2
    assert "MINDSPEED_OPS=swiglu=npu cannot run: it runs on npu" in capsys.readouterr().err


def test_unusable_device_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("MINDSPEED_DEVICE", "tpu")
    assert main(["features"]) == 2
    error = capsys.readouterr().err
    assert "MINDSPEED_DEVICE=tpu is not a device" in error
    assert error.count("\n") == 1
