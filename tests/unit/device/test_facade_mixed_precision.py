"""Mixed precision, seeds and peaks asked of cuda are those of the cpu, and not silently none."""

import pytest
import torch

MATRIX = torch.randn(4, 4)


@pytest.mark.parametrize(
    "options, dtype",
    [
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({}, torch.float16),
        ({"dtype": torch.bfloat16, "enabled": False}, torch.float32),
    ],
    ids=str,
)
def test_autocast_for_cuda_casts(facade, recwarn, options, dtype):
    with torch.autocast("cuda", **options):
        assert (MATRIX @ MATRIX).dtype == dtype
        assert torch.is_autocast_enabled() == options.get("enabled", True)
        assert torch.is_autocast_enabled("cuda") == torch.is_autocast_enabled("cpu")
        assert dtype == torch.float32 or torch.get_autocast_gpu_dtype() == dtype
        with torch.autocast("cuda", enabled=False):
            assert (MATRIX @ MATRIX).dtype == torch.float32
    assert not torch.is_autocast_enabled() and not recwarn.list


def test_an_autograd_function_takes_the_autocast_of_its_forward(facade):
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, x):
            return x @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            assert (MATRIX @ MATRIX).dtype == torch.bfloat16
            return gradient.float()

    with torch.autocast("cuda", dtype=torch.bfloat16):
        made = Product.apply(MATRIX.clone().requires_grad_())
    assert made.dtype == torch.bfloat16
    made.sum().backward()


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "cpu"])
def test_the_scaler_scales_and_skips_infinite_steps(facade, device):
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    scaler.scale((weight * 2).sum()).backward()
    assert weight.grad.tolist() == [16.0, 16.0]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [-1.0, -1.0]
    weight.grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [-1.0, -1.0] and scaler.get_scale() == 4.0


def test_the_states_of_all_devices_hold_the_generator(facade):
    torch.cuda.manual_seed_all(5)
    states = torch.cuda.get_rng_state_all()
    drawn = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(drawn, torch.rand(3, device="cuda"))
    for seed in (torch.cuda.seed, torch.cuda.seed_all):
        torch.cuda.manual_seed(5)
        seed()
        assert not torch.equal(drawn, torch.rand(3, device="cuda"))


def test_the_peak_of_memory_starts_again(facade, resident_pages):
    size = len(resident_pages)
    high = torch.cuda.max_memory_allocated()
    resident_pages.close()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() < high - 0.9 * size


def test_a_table_of_places_lands_on_the_cpu(facade, tmp_path):
    torch.save(torch.ones(2), tmp_path / "file")
    places = {"cpu": "cuda:1", "cuda:0": "cuda:1"}
    assert torch.load(tmp_path / "file", map_location=places).device.type == "cpu"
