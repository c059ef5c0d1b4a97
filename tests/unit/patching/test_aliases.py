"""A module tree answers under a second name with the same module objects."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from mindspeed.patching import Aliases, Patch


@pytest.fixture
def real(write):
    write(
        house__engine__core="class Wheel:\n    pass",
        house__engine__heavy="loaded = True",
        house__engine__parts__bolt="from house.engine.core import Wheel\nsize = 3",
        house__broken="import no_such_dependency",
    )
    return "house.engine"


@pytest.fixture
def aliases():
    aliases = Aliases()
    yield aliases
    aliases.revert()
    assert aliases not in sys.meta_path
    assert not [name for name in sys.modules if name.split(".")[0] == "machine"]


def test_the_same_module_objects_under_both_names(real, aliases):
    assert aliases.serve("machine", real) is True
    import machine
    import machine.core
    import machine.parts.bolt
    from machine.core import Wheel
    from machine.parts import bolt

    engine = sys.modules["house.engine"]
    assert machine is engine and machine.core is engine.core and bolt is engine.parts.bolt
    assert sys.modules["machine.parts.bolt"] is sys.modules["house.engine.parts.bolt"]
    assert bolt.Wheel is Wheel
    for name in ("", ".core", ".parts", ".parts.bolt"):
        module = sys.modules["machine" + name]
        assert module.__name__ == module.__spec__.name == "house.engine" + name
        assert "heavy" not in vars(engine)


def test_the_real_name_may_come_first_or_second(real, aliases):
    bolt = importlib.import_module("house.engine.parts.bolt")
    aliases.serve("machine", real)
    assert importlib.import_module("machine.parts.bolt") is bolt
    core = importlib.import_module("machine.core")
    assert importlib.import_module("house.engine.core") is core


def test_nothing_is_imported_before_it_is_asked_for(real, aliases):
    aliases.serve("machine", real)
    assert "house" not in sys.modules
    spec = importlib.util.find_spec("machine")
    assert spec.name == "machine" and spec.submodule_search_locations
    assert "house" not in sys.modules
    importlib.import_module("machine.core")
    assert "house.engine.heavy" not in sys.modules and "house.engine.parts" not in sys.modules
    assert importlib.util.find_spec("machine.heavy").name == "machine.heavy"
    assert importlib.util.find_spec("machine.core") is sys.modules["house.engine.core"].__spec__
    assert importlib.util.find_spec("machine.nothing") is None
    assert "house.engine.heavy" not in sys.modules


def test_what_is_missing_is_missing_under_the_name_asked_for(real, aliases):
    aliases.serve("machine", real)
    with pytest.raises(ModuleNotFoundError) as caught:
        import machine.parts.screw
    assert caught.value.name == "machine.parts.screw"
    with pytest.raises(ModuleNotFoundError) as caught:
        import machine.core.inside  # noqa: F401
    assert caught.value.name == "machine.core.inside"
    with pytest.raises(ImportError):
        from machine.core import no_such_name  # noqa: F401
    aliases.serve("machine_two", "house")
    with pytest.raises(ModuleNotFoundError) as caught:
        import machine_two.broken  # noqa: F401
    assert caught.value.name == "no_such_dependency"


def test_the_real_package_goes_first(real, write, aliases):
    write(gadget__part="x = 1")
    assert aliases.serve("gadget", real) is False
    assert aliases.serve("json", real) is False  # loaded
    assert aliases.serve("sys", real) is False  # built in
    assert "gadget" not in sys.modules and aliases not in sys.meta_path
    assert importlib.import_module("gadget.part").x == 1


def test_a_directory_without_code_is_not_a_package(real, aliases, tmp_path):
    (tmp_path / "machine" / "__pycache__").mkdir(parents=True)
    assert aliases.serve("machine", real) is True
    (tmp_path / "apparatus").mkdir()
    (tmp_path / "apparatus" / "tool.py").touch()
    assert aliases.serve("apparatus", real) is False
    assert "machine" not in sys.modules
    assert importlib.import_module("machine.core") is sys.modules["house.engine.core"]


def test_one_name_has_one_answer(real, aliases):
    assert aliases.serve("machine", real) and aliases.serve("machine", real)
    assert not aliases.serve("machine", "house")
    assert not Aliases().serve("machine", "house")


@pytest.mark.parametrize("space", ["family", "family.branch"])
def test_inside_a_namespace_package(real, tmp_path, space):
    directory = tmp_path.joinpath(*space.split("."))
    (directory / "core").mkdir(parents=True)
    (directory / "core" / "__init__.py").write_text("name = 'real'")
    importlib.invalidate_caches()
    aliases = Aliases()
    try:
        assert aliases.serve(f"{space}.core", real) is False
        assert aliases.serve(f"{space}.training", real) is True
        assert f"{space}.core" not in sys.modules
        assert importlib.import_module(f"{space}.training.parts.bolt").size == 3
        assert importlib.import_module(f"{space}.core").name == "real"
        parent = sys.modules[space]
        assert parent.training is sys.modules["house.engine"]
        assert list(parent.__path__) == [str(directory)]
        aliases.revert()
        assert not hasattr(parent, "training") and hasattr(parent, "core")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{space}.training")
    finally:
        aliases.revert()
        for name in [name for name in sys.modules if name.split(".")[0] == "family"]:
            del sys.modules[name]


def test_revert_leaves_the_real_modules(real, aliases):
    aliases.serve("machine", real)
    core = importlib.import_module("machine.core")
    aliases.revert()
    assert "machine" not in sys.modules and "machine.core" not in sys.modules
    assert sys.modules["house.engine.core"] is core
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("machine.core")
    assert aliases.serve("machine", real)
    assert importlib.import_module("machine.core") is core


@pytest.mark.parametrize("target", ["machine.core:Wheel", "house.engine.core:Wheel"])
@pytest.mark.parametrize("imported", ["machine.core", "house.engine.core"])
@pytest.mark.parametrize("patch_first", [True, False])
def test_patches_reach_through_aliases(real, aliases, patcher, target, imported, patch_first):
    def subclass(original):
        return type("Better", (original,), {})

    if patch_first:
        patcher.apply("x", [Patch.wrap(target, subclass)])
    aliases.serve("machine", real)
    importlib.import_module(imported)
    if not patch_first:
        patcher.apply("x", [Patch.wrap(target, subclass)])
    module = importlib.import_module("machine.core")
    assert module is importlib.import_module("house.engine.core")
    assert module.Wheel.__name__ == "Better"
    patcher.revert()
    assert module.Wheel.__name__ == "Wheel"


def test_a_module_that_cannot_work_here_is_answered_for(real, write, aliases):
    write(shop__sign="x = 1", shop__lathe="import no_such_motor")
    assert aliases.serve("shop.lathe", "house.engine.core", without="json") is False
    assert aliases.serve("shop.missing", "house.engine.core", without="no_such_motor") is False
    assert aliases.serve("shop.missing", "house.engine.core", without="json") is False
    assert aliases.serve("shop.lathe", "house.engine.core", without="no_such_motor") is True
    from shop import lathe, sign

    assert lathe is sys.modules["house.engine.core"] and sign.x == 1
    aliases.revert()
    with pytest.raises(ModuleNotFoundError, match="no_such_motor"):
        importlib.import_module("shop.lathe")


def test_a_module_in_a_directory_without_init_of_a_package_not_imported(real, write, aliases):
    write(plant__hall__press="import no_such_motor", plant__hall__init="")
    Path(importlib.util.find_spec("plant").origin).parent.joinpath("hall/__init__.py").unlink()
    importlib.invalidate_caches()
    assert aliases.serve("plant.hall.press", "house.engine.core", without="no_such_motor") is True
    assert aliases.serve("plant.yard.press", "house.engine.core", without="no_such_motor") is False
    assert "plant" not in sys.modules
    from plant.hall import press

    assert press is sys.modules["house.engine.core"]
