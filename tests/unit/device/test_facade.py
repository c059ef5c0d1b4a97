"""While the facade is installed, code for torch.cuda runs on the cpu; then all is as before."""

import contextlib
import logging
import os
import subprocess
import sys
import types

import pytest
import torch

from mindspeed.device.cpu import Cpu
from mindspeed.device.facade import Facade

ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TRITON_INTERPRET": "1"}
SPELLINGS = ["cuda", "cuda:3", torch.device("cuda"), torch.device("cuda", 1), 0]


@pytest.fixture
def cpu():
    return Cpu()


@pytest.fixture
def facade(cpu):
    with Facade(cpu):
        yield


def snapshot():
    owners = (torch, torch.cuda, torch.Tensor, torch.nn.Module, torch.distributed)
    return {(id(owner), name): value for owner in owners for name, value in vars(owner).items()}


def test_it_is_reversible(cpu):
    before = snapshot()
    with Facade(cpu):
        assert snapshot() != before
    assert snapshot() == before


@pytest.mark.parametrize("device", SPELLINGS, ids=str)
def test_every_spelling_of_a_cuda_device_lands_on_the_cpu(facade, device):
    made = [
        torch.zeros(2, device=device),
        torch.tensor([1.0], device=device),
        torch.randn(2, device=device),
        torch.arange(3, device=device, pin_memory=True),
        torch.empty_like(torch.ones(2), device=device),
        torch.ones(2).to(device),
        torch.ones(2).to(device=device, non_blocking=True),
        torch.ones(2).cuda(device).pin_memory(),
        torch.ones(2).new_zeros(3, device=device),
        torch.nn.Linear(2, 2).to(device).weight,
        torch.nn.Linear(2, 2, device=device).cuda(device).weight,
        torch.rand(2, generator=torch.Generator(device=device).manual_seed(1), device=device),
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}


@pytest.mark.parametrize("arguments", [("cuda",), ("cuda:3",), ("cuda", 1), (0,)], ids=str)
def test_a_device_made_of_any_spelling_is_a_cpu(facade, arguments, tmp_path):
    device = torch.device(*arguments)
    assert device.type == "cpu" and isinstance(device, torch.device)
    with torch.device(*arguments):
        assert torch.zeros(2).device.type == "cpu"
    torch.save({"device": device}, tmp_path / "file")
    assert torch.load(tmp_path / "file") == {"device": device}


def test_a_move_to_the_host_is_a_copy(facade):
    weight = torch.zeros(3, requires_grad=True)
    kept = [weight.detach().cpu(), weight.detach().to("cpu"), weight.detach().to(device="cpu")]
    with torch.no_grad():
        weight += 1
    assert all(torch.equal(each, torch.zeros(3)) for each in kept)
    (weight.cpu() * 2).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


def test_what_was_moved_to_the_host_is_not_on_the_device(facade):
    weight = torch.zeros(3)
    on_host = [weight.cpu(), weight.to("cpu"), torch.ones(3).pin_memory()]
    assert weight.is_cuda and not any(each.is_cuda for each in on_host)
    back = [each.cuda() for each in on_host] + [each.to("cuda") for each in on_host]
    assert all(each.is_cuda for each in back)
    assert not any(one is other for one in back for other in on_host)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_megatrons_optimizer_on_the_host_updates_the_weights(facade, fraction):
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    def trained(make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        optimizer = make(list(model.parameters()))
        for _ in range(3):
            model(torch.randn(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    adam = torch.optim.Adam
    kinds = {"cpu_optimizer_cls": adam, "gpu_optimizer_cls": adam}
    plain = trained(lambda weights: adam(weights, lr=0.01))
    hybrid = trained(
        lambda weights: HybridDeviceOptimizer(weights, offload_fraction=fraction, lr=0.01, **kinds)
    )
    torch.testing.assert_close(hybrid, plain)


@pytest.mark.parametrize("move", ["cuda", 0, torch.device("cuda")], ids=str)
def test_a_move_to_the_device_is_none_for_a_tensor_that_is_there(facade, move):
    tensor = torch.zeros(3)
    assert tensor.cuda() is tensor and tensor.to(move) is tensor
    assert tensor.to(torch.ones(1).device) is tensor


def test_rows_that_share_memory_are_apart_after_a_move(facade):
    for moved in (torch.arange(3).expand(2, 3).cuda(), torch.arange(3).expand(2, 3).to("cuda")):
        moved[0, 0] = 7
        assert moved.tolist() == [[7, 1, 2], [0, 1, 2]]


def test_other_devices_are_left_alone(facade):
    assert torch.device("meta").type == torch.device(type="meta").type == "meta"
    assert torch.device(torch.zeros(1, device="meta").device).type == "meta"
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    assert torch.ones(2).to(torch.float64).dtype == torch.float64
    assert torch.ones(2).to(torch.ones(1, dtype=torch.int32)).dtype == torch.int32


def test_a_default_device_reaches_the_factories():
    """In a fresh process: torch lists its factories once, at first use."""
    script = (
        "import torch, mindspeed.megatron_adaptor\n"
        "with torch.device('meta'): print(torch.empty(2).device, torch.arange(2).device)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["meta", "meta"], done.stderr


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


@pytest.mark.parametrize("facades", [1, 2])
@pytest.mark.parametrize("file", [torch.__file__, "/home/me/.local/lib/site-packages/some.py"])
def test_other_libraries_hear_the_truth(cpu, facades, file):
    answer = (
        "import torch\ndef ask(): "
        "return torch.cuda.is_available(), torch.ones(1).type(), torch.ones(1).is_cuda"
    )
    megatron, library = types.ModuleType("megatron.fake"), types.ModuleType("somelibrary")
    exec(compile(answer, "/anywhere/megatron/fake.py", "exec"), vars(megatron))
    exec(compile(answer, file, "exec"), vars(library))
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"]
    truth = subprocess.check_output(asked, text=True).strip() == "True"
    with contextlib.ExitStack() as stack:
        for _ in range(facades):
            stack.enter_context(Facade(cpu))
        assert megatron.ask() == (True, "torch.cuda.FloatTensor", True)
        assert library.ask() == (truth, "torch.FloatTensor", False)


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


@pytest.mark.parametrize("like", [torch.zeros_like, torch.empty_like, torch.randn_like])
def test_a_likeness_lies_where_its_model_lies(cpu, like):
    with Facade(cpu):
        like = getattr(torch, like.__name__)
        device = torch.ones(2, device="cuda")
        host = device.cpu()
        assert like(device).is_cuda and not like(host).is_cuda
        assert like(host, device="cuda").is_cuda
        state = torch.optim.Adam([host.requires_grad_()])
        host.sum().backward()
        state.step()
        assert not state.state[host]["exp_avg"].is_cuda
