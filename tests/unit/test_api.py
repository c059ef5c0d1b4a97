"""`mindspeed.enable`, `disable`, `report` and `list_features`, in a process of their own."""

import json
import subprocess
import sys

import pytest

import mindspeed

CODE = """
import json, sys
import mindspeed
prefixes = ("mindspeed.", "pydantic", "torch")
instant = sorted(name for name in sys.modules if name.startswith(prefixes))
from megatron.core.fusions import fused_bias_swiglu as upstream

# By its id: a variable that holds the function would follow the patch, as a user's copy does.
plain, seen, errors = id(upstream.bias_swiglu_impl), [], []
def is_plain():
    return id(upstream.bias_swiglu_impl) == plain
def note(**given):
    mindspeed.enable(**given)
    seen.append(["fused_swiglu" in mindspeed.report().on, not is_plain()])

note(use_fused_swiglu=True)
note(use_fused_swiglu=True, optimization_level=0)
note(config=sys.argv[1])
note(config=sys.argv[1], use_fused_swiglu=False)
note(config=sys.argv[1], optimization_level=2)
mindspeed.enable(config=sys.argv[2], swiglu_in_product=False)
from mindspeed.features.activation import current
renamed = current().options.fuse_swiglu_gemm
mindspeed.enable(config=sys.argv[1], optimization_level=2)
for wrong in ({"use_fused_swigul": True}, {"optimization_level": 5}, {"config": "nowhere.yaml"}):
    try:
        mindspeed.enable(**wrong)
    except ValueError as error:
        errors.append([type(error).__name__, str(error)])
kept = "fused_swiglu" in mindspeed.report().on
mindspeed.disable()
off = [list(mindspeed.report().on), is_plain(), str(mindspeed.report())]
names = [feature.name for feature in mindspeed.list_features()]
print(json.dumps([instant, seen, errors, kept, off, names, renamed]))
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    file = tmp_path_factory.mktemp("api") / "run.yaml"
    file.write_text("use_fused_swiglu: true\noptimization_level: 1\n")
    old = file.with_name("old.yaml")
    old.write_text("swiglu_in_product: null\n")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(file), str(old)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    keys = ("instant", "seen", "errors", "kept", "off", "names", "renamed")
    return dict(zip(keys, json.loads(done.stdout.splitlines()[-1])))


def test_import_is_instant(result):
    assert result["instant"] == ["mindspeed.lazy_import"]


def test_enable_from_keywords_and_files(result):
    on, off = [True, True], [False, False]
    assert result["seen"] == [on, off, on, off, on]


def test_a_keyword_wins_over_the_file_by_its_old_name_too(result):
    assert result["renamed"] is False


def test_wrong_options_are_refused_and_change_nothing(result):
    assert [name for name, _ in result["errors"]] == ["ConfigError"] * 3
    texts = [text for _, text in result["errors"]]
    assert texts[0] == "unknown option use_fused_swigul=True; did you mean use_fused_swiglu?"
    assert texts[1] == "optimization_level=5 is not allowed: give 0, 1 or 2"
    assert texts[2].startswith("nowhere.yaml: cannot be read")
    assert result["kept"]


def test_disable_undoes_everything(result):
    names, is_plain, text = result["off"]
    assert names == [] and is_plain
    assert "patches: 0 applied, 0 waiting" in text


def test_list_features(result):
    assert {"fused_swiglu", "recompute"} <= set(result["names"])
    assert "argument_hook" not in result["names"]


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'enabel'"):
        mindspeed.enabel()
