"""Our flags in the parser of a Megatron-LM script.

`megatron.training` is not in the wheels of megatron-core before 0.19, so a small package with the
entry points of each version stands in for it here, in a process of its own.
"""

import json
import os
import subprocess
import sys

import pytest

ARGUMENTS = """
import argparse, os, types

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(description="stand-in", allow_abbrev=False)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--num-attention-heads", type=int)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--overlap-param-gather", action="store_true")
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--profile-ranks", nargs="+", type=int, default=[0])
    parser.add_argument("--yaml-cfg")
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
    if args.yaml_cfg is not None:
        args = types.SimpleNamespace(num_layers=4)
    args.rank, args.world_size = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
    return args

def validate_args(args, defaults={}):
    return args
"""
TRAINING = """
def num_floating_point_operations(args, batch_size):
    return batch_size

def train():
    pass

def train_step():
    pass

def setup_model_and_optimizer(model_provider_func, model_type, checkpointing_context=None):
    return None

def train(forward_step_func, model, optimizer, opt_param_scheduler):
    return None
"""
COPY = "from megatron.training.arguments import parse_args as initialize\n"
INSIDE = """
def initialize(extra_args_provider=None, ignore_unknown_args=False):
    return parse_args(extra_args_provider, ignore_unknown_args)
"""
# How scripts reach parse_args: 0.12 and 0.16 import it into another module, 0.19 calls it inside.
VERSIONS = {
    "0.12-0.16": {"arguments.py": ARGUMENTS, "initialize.py": COPY},
    "0.19": {
        "arguments.py": ARGUMENTS + INSIDE,
        "initialize.py": "from megatron.training.arguments import initialize\n",
    },
}
# Runs one command line after another and tells what came of each.
DRIVER = """
import contextlib, io, json, os, sys
import mindspeed

before, cases = json.loads(sys.stdin.read())
if before:
    import megatron.training.initialize
mindspeed.enable()
from megatron.training.initialize import initialize

def more(parser):
    parser.add_argument("--script-flag", type=int, default=0)
    return parser

for case in cases:
    mindspeed.enable(**case.get("enable", {}))
    os.environ.update(case.get("env", {}))
    sys.argv = ["pretrain.py", *case["line"].split()]
    out, err, code, args = io.StringIO(), io.StringIO(), None, None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            args = vars(initialize(more, case.get("ignore_unknown", False)))
        except SystemExit as exit:
            code = exit.code
    for name in case.get("env", {}):
        del os.environ[name]
    report = list(mindspeed.report().on)
    print(json.dumps([out.getvalue(), err.getvalue(), code, args, report]))
"""
CASES = {
    "plain": {"line": "--num-layers 2 --script-flag 7"},
    "on": {"line": "--use-fused-swiglu --swiglu --seed -1 --noop-layers=1 --num-layers 3"},
    "level": {"line": "--optimization-level 1 --use-fused-swiglu --swiglu --noop-layers 1"},
    "help": {"line": "--help"},
    "typo": {"line": "--use-fused-swigul"},
    "their typo": {"line": "--num-layrs 2"},
    "ignored typo": {"line": "--use-fused-swigul", "ignore_unknown": True},
    "wrong value": {"line": "--noop-layers 1,x"},
    "no such layer": {"line": "--noop-layers 0,9 --num-layers 4"},
    "unmet": {"line": "--use-fused-swiglu"},
    "heads": {"line": "--tensor-model-parallel-size 3 --num-attention-heads 4"},
    "needs": {"line": "--overlap-param-gather"},
    "old name": {"line": "--swiglu-in-product --swiglu"},
    "quiet rank": {"line": "--use-fused-swiglu", "env": {"RANK": "1"}},
    "first of a machine": {"line": "--use-fused-swiglu", "env": {"RANK": "8", "LOCAL_RANK": "0"}},
    "preset": {"line": "--swiglu", "enable": {"use_fused_swiglu": True}},
    "preset undone": {"line": "--no-use-fused-swiglu", "enable": {"use_fused_swiglu": True}},
    "after the preset": {"line": "--swiglu"},
    "shared flag": {"line": "--profile --profile-level level1"},
    "shared flag given": {"line": "--profile --profile-ranks 0 --profile-with-cpu"},
    "shared preset": {"line": "", "enable": {"profile": True, "profile_ranks": (0,)}},
    "yaml": {"line": "--yaml-cfg x.yaml", "enable": {"noop_layers": (0,)}},
}


@pytest.fixture(scope="module", params=[(v, early) for v in VERSIONS for early in (False, True)])
def results(request, tmp_path_factory):
    version, early = request.param
    root = tmp_path_factory.mktemp("megatron_lm")
    package = root / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "training.py").write_text(TRAINING)
    for name, text in VERSIONS[version].items():
        (package / name).write_text(text)
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    clean = {name: value for name, value in os.environ.items() if "RANK" not in name}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([early, list(CASES.values())]),
        env={**clean, "PYTHONPATH": path, "MINDSPEED_DEVICE": "cpu", "COLUMNS": "80"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    keys = ("out", "err", "code", "args", "on")
    return {name: dict(zip(keys, line)) for name, line in zip(CASES, lines, strict=True)}


def test_features_on_before_the_script_imports_megatron_training_reach_it(tmp_path):
    """As with the defaults of a device: the parser finds them on and changes nothing."""
    files = {
        **VERSIONS["0.12-0.16"],
        "utils.py": "def get_batch_on_this_tp_rank(data_iterator):\n    return {}\n",
        "training.py": TRAINING,
    }
    script = """
import sys
import mindspeed
mindspeed.enable(skip_batch_broadcasts=True)
from megatron.training.initialize import initialize
from megatron.training.utils import get_batch_on_this_tp_rank
sys.argv = ["pretrain.py"]
initialize()
print(get_batch_on_this_tp_rank.__wrapped__.__name__)
"""
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    for name, text in {**files, "__init__.py": ""}.items():
        (package / name).write_text(text)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path, "MINDSPEED_DEVICE": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "get_batch_on_this_tp_rank\n", done.stderr


def test_a_script_without_our_flags_parses_as_before(results):
    args = results["plain"]["args"]
    assert (args["num_layers"], args["script_flag"], args["seed"]) == (2, 7, 1234)
    assert args["optimization_level"] == 2
    assert args["use_fused_rmsnorm"] is args["use_fused_swiglu"] is None  # the device decides
    assert "fused_swiglu" not in results["plain"]["on"]


def test_our_flags_are_parsed_with_theirs_and_switch_features_on(results):
    assert results["on"]["args"]["seed"] == -1
    assert results["on"]["args"]["noop_layers"] == [1]
    assert {"fused_swiglu", "noop_layers"} <= set(results["on"]["on"])
    assert "noop_layers" not in results["level"]["on"]
    assert "fused_swiglu" in results["level"]["on"]


def test_help_shows_our_group(results):
    assert results["help"]["code"] == 0
    _, _, ours = results["help"]["out"].partition("\nmindspeed:\n")
    assert "--optimization-level {0,1,2}" in ours
    assert "--use-fused-swiglu" in ours
    assert "\n  --num-layers" not in ours


@pytest.mark.parametrize(
    "case, flag", [("typo", "--use-fused-swiglu"), ("their typo", "--num-layers")]
)
def test_unknown_flag_names_the_nearest_of_ours_and_theirs(results, case, flag):
    assert results[case]["code"] == 2
    assert "error: unrecognized arguments: " in results[case]["err"]
    assert results[case]["err"].endswith(f"did you mean {flag}?\n")


def test_unknown_flags_can_be_ignored_as_upstream(results):
    assert results["ignored typo"]["code"] is None


@pytest.mark.parametrize(
    "case, message",
    [
        ("wrong value", "--noop-layers 1,x is not allowed: give a whole number, or several"),
        ("no such layer", "--noop-layers 0,9 names a layer that does not exist: --num-layers 4"),
        ("unmet", "--use-fused-swiglu needs a SwiGLU MLP: add --swiglu or drop"),
        ("heads", "--tensor-model-parallel-size 3 does not divide --num-attention-heads 4: use"),
        (
            "old name",
            "--swiglu-in-product needs --use-fused-swiglu: add --use-fused-swiglu or drop",
        ),
        ("needs", "--overlap-param-gather needs --use-distributed-optimizer: add"),
        ("first of a machine", "--use-fused-swiglu needs a SwiGLU MLP"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(results, case, message):
    assert results[case]["code"] == 2
    assert results[case]["err"].startswith(f"mindspeed: error: {message}")
    assert results[case]["err"].count("\n") == 1
    assert "fused_swiglu" not in results[case]["on"]


def test_one_rank_of_a_machine_speaks(results):
    assert results["quiet rank"]["code"] == 2
    assert results["quiet rank"]["err"] == ""


def test_options_from_python_are_the_defaults_of_the_flags(results):
    assert "fused_swiglu" in results["preset"]["on"]
    assert "fused_swiglu" not in results["preset undone"]["on"]
    assert "fused_swiglu" not in results["after the preset"]["on"]


def test_flags_that_megatron_has_too_have_our_defaults(results):
    cases = ("plain", "shared flag", "shared flag given", "shared preset")
    ranks = [results[case]["args"]["profile_ranks"] for case in cases]
    assert ranks == [[-1], [-1], [0], [0]]
    assert ["profile" in results[case]["on"] for case in cases] == [False, True, True, True]


def test_megatrons_own_yaml_is_left_alone(results):
    assert results["yaml"]["args"] == {"num_layers": 4, "rank": 0, "world_size": 1}
    assert "noop_layers" in results["yaml"]["on"]
