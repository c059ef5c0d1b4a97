"""Features go on and off, again and again, and leave nothing behind."""

import sys
import types
from contextlib import contextmanager

import pytest

from mindspeed import config
from mindspeed.compat.table import Entry
from mindspeed.config import ConfigError
from mindspeed.features.activation import Activation
from mindspeed.features.base import Effect, Feature, Level, bind
from mindspeed.features.registry import Registry
from mindspeed.patching import Patch, PatchError

UPSTREAM = "upstream_library"
log = []


def scale(original, factor):
    def area(width, height):
        return factor * original(width, height)

    return area


@contextmanager
def base_switched():
    log.append("base on")
    yield
    log.append("base off")


def base():
    return Entry(
        name="base",
        reason="Nothing works without it.",
        effects=lambda: [Effect("the base is there", base_switched())],
    )


class Scale(Feature):
    name, title, group, level = "scale", "Scale", "Affinity", Level.AFFINITY
    enabled_by = "scale"

    class Options(config.Options):
        scale: int = 0
        """Factor."""

    def patches(self, options):
        yield Patch.wrap(f"{UPSTREAM}:area", bind(f"{__name__}:scale", options.scale), why="test")


class Broken(Feature):
    name, title, group, level = "broken", "Broken", "Algorithm", Level.ALGORITHM
    enabled_by = "broken"

    class Options(config.Options):
        broken: bool = False
        """Patch what does not exist."""

    def effects(self, options):
        @contextmanager
        def switched():
            log.append("broken on")
            yield
            log.append("broken off")

        yield Effect("half of it works", switched())

    def patches(self, options):
        yield Patch.replace(f"{UPSTREAM}:volume", lambda: 0)


class Stuck(Feature):
    name, title, group, level = "stuck", "Stuck", "Algorithm", Level.ALGORITHM
    enabled_by = "stuck"

    class Options(config.Options):
        stuck: bool = False
        """Cannot be undone."""

    def effects(self, options):
        @contextmanager
        def switched():
            yield
            raise OSError("busy")

        yield Effect("it sticks", switched())


@pytest.fixture
def upstream():
    module = types.ModuleType(UPSTREAM)
    exec("def area(width, height):\n    return width * height", module.__dict__)
    sys.modules[UPSTREAM] = module
    log.clear()
    yield module
    del sys.modules[UPSTREAM]


@pytest.fixture
def activation(upstream):
    activation = Activation(Registry([Scale(), Broken()]), [base()])
    yield activation
    activation.deactivate()


def options(activation, **values):
    return activation.registry.options_class(**values)


def test_on_again_with_other_options_and_off(activation, upstream):
    plain = upstream.area
    activation.activate(options(activation, scale=2))
    assert upstream.area(2, 3) == 12
    activation.activate(options(activation, scale=10))
    assert upstream.area(2, 3) == 60
    activation.activate(options(activation, scale=10, optimization_level=0))
    assert upstream.area is plain
    activation.activate(options(activation, scale=3))
    activation.deactivate()
    assert upstream.area is plain
    assert activation.options == options(activation)


def test_one_that_cannot_be_undone_keeps_no_other_on(upstream):
    activation, plain = Activation(Registry([Scale(), Stuck()]), [base()]), upstream.area
    for _ in range(2):
        activation.activate(options(activation, scale=2, stuck=True))
        assert upstream.area(2, 3) == 12
        with pytest.raises(OSError, match="busy"):
            activation.deactivate()
        assert upstream.area is plain and not activation.report().on
    assert log == ["base on", "base off"] * 2


def test_what_does_not_change_is_not_touched(activation, upstream):
    activation.activate(options(activation, scale=2))
    wrapped = upstream.area
    activation.activate(options(activation, scale=2, optimization_level=1))
    assert upstream.area is wrapped
    assert log == ["base on"]
    activation.deactivate()
    assert log == ["base on", "base off"]


def test_wrong_options_change_nothing(activation, upstream):
    activation.activate(options(activation, scale=2))
    registry = Registry([Scale(), Broken(), Picky()])
    picky = Activation(registry, [base()])
    with pytest.raises(ConfigError, match="never"):
        picky.activate(registry.options_class(picky=True, scale=5))
    assert picky.report().on == ()
    assert upstream.area(2, 3) == 12


class Picky(Feature):
    name, title, group, level = "picky", "Picky", "Affinity", Level.AFFINITY
    enabled_by = "picky"

    class Options(config.Options):
        picky: bool = False
        """Never satisfied."""

    def check(self, options, context):
        raise ConfigError("never")


def test_a_patch_that_fails_puts_everything_back(activation, upstream):
    activation.activate(options(activation, scale=2))
    log.clear()
    with pytest.raises(PatchError, match="broken"):
        activation.activate(options(activation, scale=7, broken=True))
    assert upstream.area(2, 3) == 12
    assert activation.options == options(activation, scale=2)
    assert activation.report().on == ("base", "scale")
    assert log == ["broken on", "broken off"]


class Later(Feature):
    name, title, group, level = "later", "Later", "Affinity", Level.AFFINITY
    enabled_by = "later"

    class Options(config.Options):
        later: bool = False
        """Come after the base."""

    def effects(self, options):
        @contextmanager
        def switched():
            log.append("later on")
            yield
            log.append("later off")

        yield Effect("it stands upon the base", switched())


def test_the_last_feature_is_the_first_to_go(upstream):
    activation = Activation(Registry([Later()]), [base()])
    activation.activate(options(activation, later=True))
    activation.deactivate()
    assert log == ["base on", "later on", "later off", "base off"]


def test_report_reads_as_a_table(activation, upstream):
    assert "nothing is enabled" in str(activation.report())
    activation.activate(options(activation, scale=2))
    upstream.area_again = upstream.area
    lines = str(activation.report()).splitlines()
    assert lines[0].split() == ["feature", "level", "state", "why"]
    assert lines[1:] == [
        "base     0      on     always on",
        "    the base is there",
        "scale    1      on     scale is set",
        lines[4],
        "broken   2      off    broken is not set",
        "2 of 3 features on; patches: 1 applied, 0 waiting for their module to be imported",
    ]
    assert lines[4].startswith(f"    wrap {UPSTREAM}:area: applied, ")


def test_a_patch_waits_for_its_module(activation, upstream, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{UPSTREAM}.py").write_text("def area(width, height):\n    return 1\n")
    del sys.modules[UPSTREAM]
    activation.activate(options(activation, scale=4))
    assert f"wrap {UPSTREAM}:area: waiting" in str(activation.report())
    import upstream_library

    assert upstream_library.area(5, 5) == 4
    assert f"wrap {UPSTREAM}:area: applied" in str(activation.report())


def test_an_entry_for_other_devices_stays_off(upstream, monkeypatch):
    monkeypatch.setattr("mindspeed.features.activation.device_name", lambda: "cuda")
    elsewhere = Entry(
        name="elsewhere",
        reason="Only a cpu needs it.",
        devices=("cpu", "npu"),
        patches=(Patch.replace(f"{UPSTREAM}:volume", lambda: 0),),
    )
    activation = Activation(Registry([]), [base(), elsewhere])
    activation.activate(options(activation, optimization_level=0))
    assert activation.report().on == ("base",)
    assert "elsewhere  0      off    for cpu or npu, not cuda" in str(activation.report())
    activation.deactivate()
