"""Imports point down only, and each room knows its neighbours."""

import pytest

from tests.conventions.source import imports, sources

BELOW = {
    "mindspeed/device": (),
    "mindspeed/patching": (),
    "mindspeed/config": (),
    "mindspeed/checkpoint": ("config",),
    "mindspeed/features": ("config", "patching", "device"),
    "mindspeed/ops": ("device",),
    "mindspeed/parallel": ("ops", "device"),
    "mindspeed/optim": ("ops", "parallel", "device"),
    "mindspeed/compat": ("ops", "device", "patching", "launch"),
    "mindspeed/te": ("ops", "parallel", "optim", "compat", "device"),
    "mindspeed/fsdp": ("config", "device"),
    "mindspeed/launch": ("config", "device"),
    "mindspeed/tune": ("device",),
    "mindspeed/core": (),
    "mindspeed/doctor": ("config", "device", "launch", "compat", "ops"),
}
FLOORS = {"mindspeed": 1, "mindspeed_llm": 2, "mindspeed_mm": 3}


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_imports_point_down(source):
    package = source.path.parts[0]
    for name, line in imports(source):
        top, *rest = name.split(".")
        where = f"{source.name}:{line} imports {name}"
        if top not in FLOORS:
            continue
        assert FLOORS[top] <= FLOORS[package], f"{where}, a floor above"
        if top == package == "mindspeed" and rest:
            is_command = source.room in ("mindspeed/cli", "mindspeed/__main__.py")
            assert is_command or rest[0] != "cli", f"{where}: only commands may"
            if source.room in BELOW and f"mindspeed/{rest[0]}" != source.room:
                assert rest[0] in BELOW[source.room], f"{where}: {BELOW[source.room]} are below it"


def test_every_room_has_its_place():
    folders = {
        s.room for s in sources() if len(s.path.parts) > 2 and s.path.parts[0] == "mindspeed"
    }
    assert folders - {"mindspeed/cli"} == set(BELOW) & folders, "add the new room to BELOW"
