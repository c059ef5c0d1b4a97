import logging
import subprocess
import sys

import pytest
import torch

from mindspeed.ops.dispatch import Impl, Op, known_ops

CPU_TWIN = Impl("twin", "math:fsum", device="cpu")


def op(*impls: Impl, name: str = "swiglu") -> Op:
    # Standard-library functions stand for implementations: which one runs shows in the result.
    return Op(name, reference="builtins:list", impls=impls)


def test_first_usable_implementation_of_the_device_runs():
    other = Impl("other", "math:prod", device="npu")
    assert op(other, CPU_TWIN)(torch.tensor([2.0, 5.0])) == 7.0


def test_reference_runs_silently_where_nothing_else_is_declared(caplog):
    caplog.set_level(logging.INFO, "mindspeed.ops.dispatch")
    assert op(Impl("other", "math:prod", device="npu"))(torch.tensor([2.0, 5.0])) == [2.0, 5.0]
    assert caplog.records == []


def test_fallback_is_logged_once_with_the_reason(caplog):
    caplog.set_level(logging.INFO, "mindspeed.ops.dispatch")
    broken = Impl("broken", "math:fsum", device="cpu", needs=("no_such_package",))
    fallen = op(broken)
    assert fallen(torch.ones(2)) == fallen(torch.ones(2)) == [1.0, 1.0]
    (record,) = caplog.records
    assert "op swiglu uses reference (" in record.getMessage()
    assert "broken: the package no_such_package is not installed" in record.getMessage()


def test_second_implementation_is_tried_before_the_reference():
    broken = Impl("broken", "math:prod", device="cpu", needs=("no_such_package",))
    assert op(broken, CPU_TWIN)(torch.tensor([2.0, 5.0])) == 7.0


def test_forced_implementation_runs(monkeypatch):
    monkeypatch.setenv("MINDSPEED_OPS", "rms_norm=npu, swiglu = second")
    second = Impl("second", "math:prod", device="cpu")
    assert op(CPU_TWIN, second)(torch.tensor([2.0, 5.0])) == 10.0


def test_forced_reference_runs_and_the_choice_follows_the_environment(monkeypatch):
    chosen = op(CPU_TWIN)
    assert chosen(torch.ones(2)) == 2.0
    monkeypatch.setenv("MINDSPEED_OPS", "swiglu=reference")
    assert chosen(torch.ones(2)) == [1.0, 1.0]
    monkeypatch.delenv("MINDSPEED_OPS")
    assert chosen(torch.ones(2)) == 2.0


@pytest.mark.parametrize(
    ("forced", "error", "message"),
    [
        ("swiglu=npu", RuntimeError, "runs on npu, the tensors are on cpu.*reference, npu, lame"),
        ("swiglu=lame", RuntimeError, "no_such_package is not installed.*reference, npu, lame"),
        ("swiglu=nup", ValueError, "nup is not known. Known: reference, npu, lame. .*mean npu"),
        ("swigul=npu", ValueError, "swigul is not known.*Did you mean swiglu"),
        ("swiglu", ValueError, "write op=implementation"),
    ],
)
def test_forced_choice_that_cannot_run_is_an_error(monkeypatch, forced, error, message):
    monkeypatch.setenv("MINDSPEED_OPS", forced)
    npu = Impl("npu", "math:prod", device="npu")
    lame = Impl("lame", "math:prod", device="cpu", needs=("no_such_package",))
    with pytest.raises(error, match=message):
        op(npu, lame)(torch.ones(2))


def test_tensor_is_found_in_keywords_and_lists():
    assert op(CPU_TWIN)([torch.ones(()), torch.ones(())]) == 2.0
    with pytest.raises(TypeError, match="without a tensor"):
        op(CPU_TWIN)([1.0])


def test_the_choice_says_why_no_faster_one():
    broken = Impl("broken", "math:prod", device="cpu", needs=("no_such_package",))
    choice = op(broken, CPU_TWIN).choice("cpu")
    assert (choice.name, choice.target) == ("twin", "math:fsum")
    assert choice.obstacles == ("broken: the package no_such_package is not installed",)
    assert op(broken).choice("cpu").name == op(broken).choice("cuda").name == "reference"


def test_what_no_implementation_serves_is_refused_before_any_runs():
    checked = Op("swiglu", reference="builtins:list", impls=(CPU_TWIN,), check="torch:numel")
    assert checked(torch.tensor([2.0, 5.0])) == 7.0
    with pytest.raises(TypeError, match="numel"):
        checked(torch.tensor([2.0, 5.0]), "another")


def test_an_op_compiles_without_a_graph_break():
    # In a process of its own: the adaptor's cpu device is not one that torch.compile knows.
    program = """
import torch
from mindspeed.ops.dispatch import Op
op = Op("swiglu", reference="torch.nn.functional:relu6", check="torch:is_tensor")
compiled = torch.compile(lambda x: op(x) + 1, backend="aot_eager", fullgraph=True)
assert compiled(torch.full((3,), 9.0)).tolist() == [7.0, 7.0, 7.0]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_call_costs_a_few_function_calls():
    """They stand for its two microseconds, which a busy machine would make many."""
    light, x, calls = Op("swiglu", reference="builtins:id"), torch.ones(1), []
    light(x)  # it is chosen once
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, function: calls.append(event))
    try:
        light(x)
    finally:
        sys.setprofile(before)
    assert sum(event in ("call", "c_call") for event in calls) <= 15


def test_every_operator_is_known_by_its_name():
    ops = known_ops()
    assert {"add_rms_norm", "rms_norm", "swiglu"} <= set(ops)
    assert all(op.name == name for name, op in ops.items())
