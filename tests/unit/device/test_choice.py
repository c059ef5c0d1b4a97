"""The device is chosen by preference, or by MINDSPEED_DEVICE, which must be usable."""

import sys

import pytest
import torch

from mindspeed import device


def test_without_an_accelerator_the_cpu_is_chosen(monkeypatch):
    monkeypatch.delenv("MINDSPEED_DEVICE", raising=False)
    usable = [name for name, kind in device.known().items() if kind.unusable_reason() is None]
    assert device.current().name == usable[0]
    assert list(device.known()) == ["npu", "cuda", "cpu"]


def test_the_variable_overrides(monkeypatch):
    monkeypatch.setenv("MINDSPEED_DEVICE", "cpu")
    assert device.current().name == "cpu"
    assert device.current().backend == "gloo"
    assert device.current().torch_device == torch.device("cpu")


def test_an_unknown_device_names_the_known_ones(monkeypatch):
    monkeypatch.setenv("MINDSPEED_DEVICE", "tpu")
    with pytest.raises(device.DeviceError, match="MINDSPEED_DEVICE=tpu .* use cpu, cuda, npu"):
        device.current()


@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_a_forced_device_that_is_absent_says_what_is_missing(monkeypatch, name):
    reason = device.known()[name].unusable_reason()
    if reason is None:
        pytest.skip(f"this machine has {name}")
    monkeypatch.setenv("MINDSPEED_DEVICE", name)
    with pytest.raises(device.DeviceError) as error:
        device.current()
    assert reason in str(error.value) and "unset MINDSPEED_DEVICE" in str(error.value)


def test_the_cpu_generator_is_the_one_random_ops_draw_from():
    cpu = device.known()["cpu"]
    state = cpu.get_rng_state()
    first = torch.rand(4)
    cpu.set_rng_state(state)
    assert torch.equal(first, torch.rand(4))
    cpu.manual_seed(7)
    assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(7)))


def test_memory_is_the_resident_set_and_its_peak_can_be_reset(cpu, resident_pages):
    size = len(resident_pages)
    resident = cpu.memory_allocated()
    high = cpu.max_memory_allocated()
    assert high >= resident > size
    resident_pages.close()
    assert cpu.memory_allocated() < resident - 0.9 * size
    cpu.reset_peak_memory()
    if sys.platform == "linux":
        assert cpu.max_memory_allocated() < high - 0.9 * size


def test_the_cpu_has_more_memory_than_this_process_took(monkeypatch):
    monkeypatch.setenv("MINDSPEED_DEVICE", "cpu")
    cpu = device.current()
    assert cpu.memory_total() > cpu.max_memory_allocated() > 0
