"""While the facade is installed, tensors for cuda lie on the cpu; then all is as before."""

import subprocess
import sys

import pytest
import torch

from mindspeed.device.facade import Facade

SPELLINGS = ["cuda", "cuda:3", torch.device("cuda"), torch.device("cuda", 1), 0]


def snapshot():
    owners = (torch, torch.cuda, torch.Tensor, torch._C._nn, torch.distributed)
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


@pytest.mark.parametrize("device", SPELLINGS, ids=str)
def test_containers_read_every_spelling_as_the_cpu(facade, device):
    for arguments, named in [((device,), {}), ((), {"device": device})]:
        assert torch._C._nn._parse_to(*arguments, **named)[0].type == "cpu"


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
