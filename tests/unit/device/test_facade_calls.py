"""While the facade is installed, torch.cuda answers for the cpu in calls from Megatron only."""

import contextlib
import inspect
import logging
import os
import subprocess
import sys
import types

import pytest
import torch

from mindspeed.device.facade import Facade

ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TRITON_INTERPRET": "1"}


def test_generators_stay_generators(facade):
    assert isinstance(torch.Generator(), torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)


def test_the_random_state_of_cuda_is_that_of_the_cpu(facade):
    torch.cuda.manual_seed(11)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(3))
    generator = torch.Generator().manual_seed(11)
    assert torch.equal(drawn, torch.rand(3, generator=generator))


def test_the_default_generators_are_the_one_of_the_cpu(facade):
    generator = torch.cuda.default_generators[5]
    generator.manual_seed(3)
    state, kept = generator.get_state(), generator.graphsafe_get_state()
    drawn = torch.rand(4)
    generator.set_state(state)
    assert torch.equal(drawn, torch.rand(4))
    generator.graphsafe_set_state(kept)
    assert torch.equal(drawn, torch.rand(4))
    generator.graphsafe_set_state(kept)  # a kept state is not used up
    assert torch.equal(drawn, torch.rand(4))


def test_streams_and_events_keep_the_order_of_the_code(facade):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    end.record(torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert end.query() and 0 <= start.elapsed_time(end) < 10_000


def test_an_event_that_was_not_recorded_has_no_distance(facade):
    with pytest.raises(RuntimeError, match="must be recorded"):
        torch.cuda.Event(enable_timing=True).elapsed_time(torch.cuda.Event())


def test_cuda_graphs_are_refused_with_the_flags_to_drop(facade):
    with pytest.raises(RuntimeError, match="cpu.*--enable-cuda-graph"):
        torch.cuda.CUDAGraph()


def test_the_device_index_is_kept(facade, cpu):
    torch.cuda.set_device(2)
    assert torch.cuda.current_device() == 2 == cpu.index()
    torch.cuda.set_device(torch.device("cuda", 1))
    assert torch.cuda.current_device() == 1


@pytest.fixture(scope="module")
def truth():
    """What a process without the facade hears."""
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"]
    return subprocess.check_output(asked, text=True).strip() == "True"


@pytest.mark.parametrize("facades", [1, 2])
@pytest.mark.parametrize("file", [torch.__file__, "/home/me/.local/lib/site-packages/some.py"])
def test_libraries_that_do_not_drive_megatron_hear_the_truth(cpu, truth, facades, file):
    answer = (
        "import torch\ndef ask(): "
        "return torch.cuda.is_available(), torch.ones(1).type(), torch.ones(1).is_cuda"
    )
    megatron, library = types.ModuleType("megatron.fake"), types.ModuleType("somelibrary")
    driver = types.ModuleType("verl.utils")
    exec(compile(answer, "/anywhere/megatron/fake.py", "exec"), vars(megatron))
    for module in (library, driver):
        exec(compile(answer, file, "exec"), vars(module))
    with contextlib.ExitStack() as stack:
        for _ in range(facades):
            stack.enter_context(Facade(cpu))
        for asked in (megatron, driver):
            assert asked.ask() == (True, "torch.cuda.FloatTensor", True)
        assert library.ask() == (truth, "torch.FloatTensor", False)


@pytest.mark.parametrize("facades", [1, 2])
def test_the_compiler_of_torch_keys_its_cache_as_without_the_facade(cpu, facades):
    from torch._inductor.codecache import CacheBase

    system = inspect.unwrap(CacheBase.get_system)
    plain = system()
    with contextlib.ExitStack() as stack:
        for _ in range(facades):
            stack.enter_context(Facade(cpu))
        assert system() == plain
        assert torch.cuda.get_device_properties(0).name == "cpu"


def test_copies_taken_by_megatron_before_are_found_and_given_back(cpu):
    module = types.ModuleType("megatron.took_copies")
    module.lazy, module.fused = torch.cuda._lazy_call, torch.compile(lambda x: x + 1)
    sys.modules[module.__name__] = module
    try:
        lazy, fused = module.lazy, module.fused
        with Facade(cpu):
            ran = []
            module.lazy(lambda: ran.append(1))
            assert ran == [1]
            assert not hasattr(module.fused, "_torchdynamo_orig_callable")
            assert module.fused(1) == 2
        assert module.lazy is lazy and module.fused is fused
    finally:
        del sys.modules[module.__name__]


def test_only_megatrons_functions_run_eagerly(facade):
    source = (
        "import torch\n@torch.compile\ndef f(x): return x\n"
        "@torch.compile(dynamic=True)\ndef g(x): return x"
    )
    megatron, script = types.ModuleType("megatron.fusions"), types.ModuleType("script")
    for module in (megatron, script):
        exec(source, vars(module))
    for name in "fg":
        assert not hasattr(getattr(megatron, name), "_torchdynamo_orig_callable")
        assert hasattr(getattr(script, name), "_torchdynamo_orig_callable")


def test_the_rng_warning_that_is_true_of_gpus_only_is_not_logged(cpu, caplog):
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    with Facade(cpu), caplog.at_level(logging.WARNING):
        logger.warning("CPU RNG state changed within GPU RNG context")
        logger.warning("something else")
    assert [record.message for record in caplog.records] == ["something else"]


def test_memory_is_reported_in_the_keys_that_megatron_reads(facade):
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] > 0
    assert torch.cuda.memory_stats()["allocation.all.current"] == 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total


def test_sensors_of_a_gpu_read_zero(facade):
    sensors = (torch.cuda.temperature, torch.cuda.power_draw, torch.cuda.utilization)
    assert [sensor() for sensor in (*sensors, torch.cuda.clock_rate)] == [0] * 4


def test_a_data_loader_leaves_the_generator_of_the_device_alone(facade):
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    assert [int(item) for item in torch.utils.data.DataLoader(range(3))] == [0, 1, 2]
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("name, value", ENVIRONMENT.items())
def test_the_environment_says_what_megatron_asks_for_unless_the_user_did(
    cpu, monkeypatch, name, value
):
    monkeypatch.delenv(name, raising=False)
    with Facade(cpu):
        assert os.environ[name] == value
    assert name not in os.environ
    monkeypatch.setenv(name, "0")
    with Facade(cpu):
        assert os.environ[name] == "0"
    assert os.environ[name] == "0"
