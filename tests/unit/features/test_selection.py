"""Levels, needs, conflicts and devices decide which features are on."""

import pytest

from mindspeed import config
from mindspeed.config import ConfigError, Spelling
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.registry import Registry
from mindspeed.features.selection import accepts, select


class Facade(Feature):
    name, title, group, level = "facade", "Facade", "Base", Level.COMPAT
    megatron_flags = ("--facade",)

    def is_on(self, options, context):
        return True


class Native(Feature):
    name, title, group, level = "native", "Native", "Megatron", Level.COMPAT
    is_native = True
    megatron_flags = ("--native-size",)

    def is_on(self, options, context):
        return context.argument("native_size", 1) > 1


class Fused(Feature):
    name, title, group, level = "fused", "Fused", "Affinity", Level.AFFINITY
    enabled_by = "use_fused"

    class Options(config.Options):
        use_fused: bool = False
        """Fuse."""
        fused_width: int = 1
        """How wide."""

    def check(self, options, context):
        if options.fused_width > 4:
            raise ConfigError(context.spelling.with_value("fused_width", options.fused_width))


class Ring(Feature):
    name, title, group, level = "ring", "Ring", "Parallel", Level.ALGORITHM
    enabled_by = "use_ring"
    requires = ("fused", "native")
    conflicts = {"star": "both move the keys"}

    class Options(config.Options):
        use_ring: bool = False
        """Ring."""


class Star(Feature):
    name, title, group, level = "star", "Star", "Parallel", Level.ALGORITHM
    enabled_by = "use_star"

    class Options(config.Options):
        use_star: bool = False
        """Star."""


class NpuOnly(Feature):
    name, title, group, level = "npu_only", "NPU", "Base", Level.COMPAT
    devices = ("npu",)
    megatron_flags = ("--npu-only",)

    def is_on(self, options, context):
        return True


class NpuSwitch(Feature):
    name, title, group, level = "npu_switch", "NPU", "Base", Level.COMPAT
    devices = ("npu",)
    enabled_by = "npu_switch"

    class Options(config.Options):
        npu_switch: bool = False
        """A switch for one device."""


class OnCpu(Feature):
    name, title, group, level = "on_cpu", "On cpu", "Affinity", Level.AFFINITY
    enabled_by = "use_on_cpu"
    default_devices = ("cpu",)

    class Options(config.Options):
        use_on_cpu: bool | None = None
        """On without being asked for."""

    def check(self, options, context):
        if context.argument("forbids"):
            raise ConfigError("--use-on-cpu and --forbids exclude each other")


class OnTopOfIt(Feature):
    name, title, group, level = "on_top_of_it", "On top", "Affinity", Level.AFFINITY
    enabled_by = "use_on_top"
    default_devices = ("cpu",)
    requires = ("on_cpu",)

    class Options(config.Options):
        use_on_top: bool | None = None
        """On where what it needs is on."""


class Rival(Feature):
    name, title, group, level = "rival", "Rival", "Affinity", Level.AFFINITY
    enabled_by = "use_rival"
    conflicts = {"on_cpu": "both write the rows"}

    class Options(config.Options):
        use_rival: bool = False
        """Excludes what is on by default."""


BY_DEVICE = Registry([OnCpu()])
ONE_NEEDS_ANOTHER = Registry([OnCpu(), OnTopOfIt()])
REGISTRY = Registry(kind() for kind in (Facade, Native, Fused, Ring, Star, NpuOnly, NpuSwitch))
WITH_MEGATRON = {"native_size": 2}


def on(context=None, **options):
    chosen = select(REGISTRY, REGISTRY.options_class(**options), context or Context())
    return {choice.feature.name for choice in chosen if choice.on}


def why(name, **options):
    chosen = select(REGISTRY, REGISTRY.options_class(**options), Context(Spelling.FLAG))
    return next(choice.why for choice in chosen if choice.feature.name == name)


@pytest.mark.parametrize(
    "level, expected",
    [(0, {"facade"}), (1, {"facade", "fused"}), (2, {"facade", "fused", "star"})],
)
def test_levels(level, expected):
    assert on(optimization_level=level, use_fused=True, use_star=True) == expected


def test_level_two_is_the_default():
    assert REGISTRY.options_class().optimization_level == 2
    assert on() == {"facade"}


def test_options_of_a_feature_that_is_off_produce_a_warning(caplog):
    on(Context(Spelling.FLAG), use_fused=True, fused_width=2)
    assert not caplog.records
    on(Context(Spelling.FLAG), fused_width=2)
    assert caplog.messages == ["--fused-width 2 has no effect: --use-fused is not set"]


def test_what_the_level_keeps_off_is_said(caplog):
    on(Context(Spelling.FLAG), optimization_level=0, use_fused=True)
    assert "--use-fused has no effect: it is level 1, above --optimization-level 0" in caplog.text
    assert why("fused", optimization_level=0, use_fused=True) == (
        "level 1 is above --optimization-level 0"
    )
    assert why("fused") == "--use-fused is not set"
    assert why("facade") == "in use"


def test_needs():
    with pytest.raises(ConfigError) as raised:
        on(Context(Spelling.FLAG, WITH_MEGATRON), use_ring=True)
    assert str(raised.value) == "--use-ring needs --use-fused: add --use-fused or drop --use-ring"
    assert "ring" in on(Context(Spelling.FLAG, WITH_MEGATRON), use_ring=True, use_fused=True)


def test_needs_of_megatron_features_are_checked_where_megatrons_arguments_are_known():
    with pytest.raises(ConfigError, match="--use-ring needs --native-size"):
        on(Context(Spelling.FLAG, {"native_size": 1}), use_ring=True, use_fused=True)
    assert "ring" in on(Context(), use_ring=True, use_fused=True)


@pytest.mark.parametrize(
    "spelling, both",
    [(Spelling.FLAG, "--use-ring and --use-star"), (Spelling.KEYWORD, "use_ring and use_star")],
)
def test_conflict_in_the_users_words(spelling, both):
    with pytest.raises(ConfigError) as raised:
        on(Context(spelling), use_ring=True, use_star=True, use_fused=True)
    assert str(raised.value) == (f"{both} cannot be used together: both move the keys; drop one")


def test_no_conflict_with_what_the_level_keeps_off():
    both = {"use_ring": True, "use_star": True, "use_fused": True}
    assert on(optimization_level=1, **both) == {"facade", "fused"}


def test_checks_run_for_features_that_are_on_only():
    on(fused_width=9)
    with pytest.raises(ConfigError, match="fused_width=9"):
        on(fused_width=9, use_fused=True)


def test_device(monkeypatch):
    monkeypatch.setenv("MINDSPEED_DEVICE", "cpu")
    assert why("npu_only") == "for npu, not cpu"
    with pytest.raises(ConfigError, match="--npu-switch is for npu, not cpu"):
        on(Context(Spelling.FLAG), npu_switch=True)


@pytest.mark.parametrize(
    ("level", "asked", "forbids", "device", "expected"),
    [
        (2, None, False, "cpu", (True, "on by default on cpu")),
        (1, None, False, "cpu", (True, "on by default on cpu")),
        (0, None, False, "cpu", (False, "level 1 is above --optimization-level 0")),
        (2, False, False, "cpu", (False, "--use-on-cpu is not set")),
        (2, True, False, "cpu", (True, "--use-on-cpu is set")),
        (2, None, True, "cpu", (False, "--use-on-cpu and --forbids exclude each other")),
        (2, None, False, "cuda", (False, "--use-on-cpu is not set")),
    ],
)
def test_on_by_device(monkeypatch, caplog, level, asked, forbids, device, expected):
    monkeypatch.setattr("mindspeed.features.selection.device_name", lambda: device)
    options = BY_DEVICE.options_class(optimization_level=level, use_on_cpu=asked)
    (choice,) = select(BY_DEVICE, options, Context(Spelling.FLAG, {"forbids": forbids}))
    assert (choice.on, choice.why) == expected
    assert not caplog.records


def test_a_default_feature_yields_to_one_that_was_asked_for(monkeypatch):
    monkeypatch.setattr("mindspeed.features.selection.device_name", lambda: "cpu")
    registry = Registry([OnCpu(), Rival()])
    options, context = registry.options_class, Context(Spelling.FLAG)
    by_default, rival = select(registry, options(use_rival=True), context)
    assert rival.on and not by_default.on
    assert by_default.why == "not together with --use-rival: both write the rows"
    with pytest.raises(ConfigError, match="--use-on-cpu and --use-rival cannot be used together"):
        select(registry, options(use_rival=True, use_on_cpu=True), context)
    registry = Registry([OnCpu(), OnTopOfIt(), Rival()])
    choices = select(registry, registry.options_class(use_rival=True), context)
    (on_top,) = [each for each in choices if each.feature.name == "on_top_of_it"]
    assert (on_top.on, on_top.why) == (False, "--use-on-cpu is off")


def test_a_default_feature_stays_off_where_its_requirement_is_off(monkeypatch):
    monkeypatch.setattr("mindspeed.features.selection.device_name", lambda: "cpu")
    options = ONE_NEEDS_ANOTHER.options_class
    found = [
        (choice.on, choice.why)
        for asked in (None, False)
        for choice in select(ONE_NEEDS_ANOTHER, options(use_on_cpu=asked), Context(Spelling.FLAG))
        if choice.feature.name == "on_top_of_it"
    ]
    assert found == [(True, "on by default on cpu"), (False, "--use-on-cpu is off")]
    with pytest.raises(ConfigError, match="--use-on-top needs --use-on-cpu"):
        select(
            ONE_NEEDS_ANOTHER,
            options(use_on_cpu=False, use_on_top=True),
            Context(Spelling.FLAG),
        )


def test_the_device_of_the_context_comes_first():
    options = BY_DEVICE.options_class()
    for device, is_on in (("cuda", False), ("cpu", True)):
        (choice,) = select(BY_DEVICE, options, Context(Spelling.FLAG, device=device))
        assert choice.on is is_on
    options = REGISTRY.options_class(npu_switch=True)
    select(REGISTRY, options, Context(device="npu"))
    with pytest.raises(ConfigError, match="is for npu, not cuda"):
        select(REGISTRY, options, Context(device="cuda"))


def test_a_question_logs_nothing(caplog):
    options = REGISTRY.options_class(optimization_level=0, use_fused=True, fused_width=2)
    assert accepts(REGISTRY, options, Context(), {"use_star": True})
    both = {"optimization_level": 2, "use_star": True, "use_ring": True}
    assert not accepts(REGISTRY, options, Context(), both)
    assert not caplog.records


def test_asked_for_and_impossible_is_an_error():
    options = BY_DEVICE.options_class(use_on_cpu=True)
    with pytest.raises(ConfigError, match="exclude each other"):
        select(BY_DEVICE, options, Context(Spelling.FLAG, {"forbids": True}))
