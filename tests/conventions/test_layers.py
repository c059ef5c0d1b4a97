"""Imports point down only, and each folder of mindspeed imports only those below it."""

from tests.conventions.source import assert_none, imports, sources

BELOW = {
    "mindspeed/device": ("distributed",),
    "mindspeed/patching": (),
    "mindspeed/config": (),
    "mindspeed/distributed": ("config",),
    "mindspeed/checkpoint": ("config",),
    "mindspeed/features": (
        "config",
        "distributed",
        "patching",
        "device",
        "compat",
        "tune",
        "profiling",
    ),
    "mindspeed/ops": ("device", "distributed"),
    "mindspeed/parallel": ("ops", "device", "distributed", "config"),
    "mindspeed/optim": ("ops", "parallel", "device"),
    "mindspeed/moe": ("ops", "parallel", "device", "distributed", "config"),
    "mindspeed/memory": ("ops", "parallel", "optim", "device", "config"),
    "mindspeed/compat": ("ops", "device", "patching", "launch"),
    "mindspeed/te": ("ops", "parallel", "optim", "memory", "compat", "device", "distributed"),
    "mindspeed/fsdp": ("config", "device", "lazy_import"),
    "mindspeed/launch": ("config", "device"),
    "mindspeed/tune": ("config", "device", "distributed"),
    "mindspeed/profiling": ("config", "device"),
    "mindspeed/training": (
        *("checkpoint", "config", "device", "distributed", "profiling", "tune"),
    ),
    "mindspeed/core": (),
    "mindspeed/doctor": (
        *("config", "device", "distributed", "launch", "compat", "ops"),
        *("features", "training", "tune"),
    ),
}
LAYERS = {"mindspeed": 1, "mindspeed_llm": 2, "mindspeed_mm": 3}


def upward_imports():
    for source in sources():
        package = source.path.parts[0]
        for name, line in imports(source):
            top, *rest = name.split(".")
            where = f"{source.name}:{line} imports {name}"
            if top in LAYERS and LAYERS[top] > LAYERS[package]:
                yield f"{where}, a layer above"
            if not (top == package == "mindspeed" and rest):
                continue
            if rest[0] == "cli" and source.folder not in ("mindspeed/cli", "mindspeed/__main__.py"):
                yield f"{where}: only commands may"
            below = BELOW.get(source.folder)
            if below is not None and rest[0] not in (*below, source.path.parts[1]):
                yield f"{where}: only {below} are below {source.folder}"


def test_imports_point_down():
    assert_none(upward_imports())


def test_every_folder_has_its_layer():
    folders = {s.folder for s in sources("mindspeed") if len(s.path.parts) > 2}
    assert folders - {"mindspeed/cli"} == set(BELOW), "BELOW in this file lists other folders"
