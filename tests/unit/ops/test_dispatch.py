import logging

import pytest
import torch

from mindspeed.ops.dispatch import Impl, Op

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
    assert "op swiglu runs its reference on cpu" in record.getMessage()
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
