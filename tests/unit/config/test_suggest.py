"""Nearest names."""

import argparse

import pytest

from mindspeed.config import did_you_mean, nearest, one_of
from mindspeed.config.suggest import suggest_flags

KNOWN = ["use_fused_swiglu", "use_fused_rmsnorm", "optimization_level"]


@pytest.mark.parametrize(
    "typed, found",
    [("use_fused_swigul", "use_fused_swiglu"), ("optimisation_level", "optimization_level")],
)
def test_nearest(typed, found):
    assert nearest(typed, KNOWN) == found
    assert did_you_mean(typed, KNOWN) == f"did you mean {found}?"


def test_nothing_near_lists_what_is_known():
    assert nearest("qqq", KNOWN) is None
    text = "known: optimization_level, use_fused_rmsnorm, use_fused_swiglu"
    assert did_you_mean("qqq", KNOWN) == text


def test_many_known_names_are_not_listed():
    hint = did_you_mean("qqq", [f"name_{number}" for number in range(100)])
    assert hint == "none of the 100 known names is similar"


FLAGS = ["--num-layers", "--eval-iters", "--load", "--help", "--prompt-type", "--sft", "--lr"]


@pytest.mark.parametrize(
    "typed, found",
    [
        ("--layers", "--num-layers"),
        ("--num-layers-total", "--num-layers"),
        ("--num_layer", "--num-layers"),
        ("--sfd", "--sft"),
        ("--device", None),
        ("--precision-type", None),
        ("--offload-activations", None),
        ("--eval", None),
        ("--lr-of-the-critic", None),
    ],
)
def test_only_close_names_are_suggested(typed, found):
    assert nearest(typed, FLAGS) == found


@pytest.mark.parametrize(
    "values, text", [([], ""), ([1], "1"), ([1, 2], "1 or 2"), ("abc", "a, b or c")]
)
def test_one_of(values, text):
    assert one_of(values) == text


@pytest.mark.parametrize(
    "words, hint",
    [
        (["--loss-type", "rop"], "--help lists what there is"),  # rope is of the other flag
        (["--loss-type", "hing"], "hing: did you mean hinge?"),
        (["--position", "rop"], "rop: did you mean rope?"),
        (["--positon", "rope"], "--positon: did you mean --position?"),
    ],
)
def test_a_choice_is_suggested_for_its_own_flag(capsys, words, hint):
    parser = argparse.ArgumentParser(prog="train", allow_abbrev=False)
    parser.add_argument("--loss-type", choices=["sigmoid", "hinge"])
    parser.add_argument("--position", choices=["rope", "none"])
    suggest_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert capsys.readouterr().err.endswith(f"; {hint}\n")
