"""Features are found, ordered and checked when they are loaded."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest

from mindspeed import config
from mindspeed.features.base import Feature, Level
from mindspeed.features.registry import Registry, registry

# Document 003, "Megatron feature support", in the document's order.
NINE = [
    "data_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "distributed_optimizer",
    "sequence_parallel",
    "async_ddp",
    "overlap_param_gather",
    "recompute",
]


def declare(name, **attributes):
    fixed = {"name": name, "title": name, "group": "Test", "level": Level.COMPAT}
    fixed["megatron_flags"] = () if "enabled_by" in attributes else (f"--{name}",)
    return type(name, (Feature,), {**fixed, **attributes})()


class Width(config.Options):
    width: int = 1
    """A width."""


@pytest.mark.parametrize(
    "features, message",
    [
        ([declare("a"), declare("a")], "feature a is declared twice"),
        (
            [declare("a", Options=Width), declare("b", Options=Width)],
            "option width is declared twice",
        ),
        ([declare("a", requires=("b",))], "feature a names the unknown feature b"),
        (
            [declare("a"), declare("b", conflicts={"aa": "x"})],
            "unknown feature aa; did you mean a?",
        ),
        ([declare("a", megatron_flags=())], "feature a has no switch: set enabled_by"),
        ([declare("a", enabled_by="width")], "feature a has no option width"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(features, message):
    with pytest.raises(RuntimeError) as raised:
        Registry(features)
    assert message in str(raised.value)


def test_common_option_cannot_be_taken():
    class Taken(config.Options):
        optimization_level: int = 0

    with pytest.raises(RuntimeError, match="option optimization_level is declared twice"):
        Registry([declare("a", Options=Taken)])


def test_an_old_name_cannot_be_taken():
    class Renamed(config.Options):
        size: Annotated[int, config.Alias("width")] = 1

    with pytest.raises(RuntimeError, match="option width is declared twice"):
        Registry([declare("a", Options=Width), declare("b", Options=Renamed)])


def test_order_is_level_then_needs_then_name():
    features = [
        declare("needs_z", requires=("z",)),
        declare("high", level=Level.ALGORITHM, enabled_by="width", Options=Width),
        declare("z"),
        declare("a"),
    ]
    assert [feature.name for feature in Registry(features)] == ["a", "z", "needs_z", "high"]


def test_the_nine_rows_of_the_document_are_declared():
    native = [feature for feature in registry() if feature.is_native]
    assert {feature.name for feature in native} == set(NINE)
    assert all(feature.megatron_flags and not list(feature.patches(None)) for feature in native)


@pytest.mark.parametrize("feature", registry(), ids=lambda feature: feature.name)
def test_every_feature_has_a_page_a_title_and_help(feature):
    root = Path(__file__).resolve().parents[3]
    assert (root / feature.docs).is_file()
    assert feature.title
    fields = registry().options_class.model_fields
    assert all(fields[field].description for field in feature.fields)


@pytest.mark.parametrize("feature", registry(), ids=lambda feature: feature.name)
def test_a_feature_is_in_the_folder_of_its_group(feature):
    folder = type(feature).__module__.split(".")[2]
    assert folder == feature.group.lower()
    assert folder in ("parallel", "memory", "fusion", "moe", "comm", "tools")


def test_loading_imports_neither_torch_nor_megatron():
    code = (
        "import sys, mindspeed; from mindspeed.features.registry import registry; registry();"
        "print([name for name in ('torch', 'megatron', 'megatron.core') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
