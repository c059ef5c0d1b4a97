"""Modules, recompute, random states and offloading of mindspeed.te on the GPU."""

import pytest
import torch
import torch.nn.functional as F

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed.te.pytorch import LayerNorm, LayerNormLinear, Linear, RMSNorm
from mindspeed.te.pytorch.cpu_offload import get_cpu_offload_context
from mindspeed.te.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from tests.distributed import te_model

pytestmark = pytest.mark.gpu
IN, OUT = 256, 384


def relative_error(given, true):
    return ((given.double().cpu() - true.double().cpu()).norm() / true.double().cpu().norm()).item()


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm, Linear, LayerNormLinear])
def test_modules_equal_float64_on_the_cpu(kind, dtype, limit):
    torch.manual_seed(0)
    sizes = (IN,) if kind in (LayerNorm, RMSNorm) else (IN, OUT)
    module = kind(*sizes, params_dtype=dtype)
    exact = kind(*sizes, params_dtype=torch.float64, device="cpu")
    assert next(module.parameters()).is_cuda
    for param, true in zip(module.parameters(), exact.parameters()):
        torch.nn.init.normal_(param)
        true.data.copy_(param.data)
    x = torch.randn(64, 2, IN, dtype=dtype)
    results = []
    for layer, given in ((module, x.cuda()), (exact, x.double())):
        given.requires_grad_()
        out = layer(given)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        out.backward(grad.to(out))
        results.append([out, given.grad, *(param.grad for param in layer.parameters())])
    for given, true in zip(*results):
        assert relative_error(given, true) < limit


def test_main_grad_is_not_rounded_to_bfloat16():
    module = Linear(IN, OUT, bias=False, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16)
    module.weight.main_grad = torch.zeros(OUT, IN, device="cuda")
    x, grad = (torch.randn(512, size, device="cuda").bfloat16() for size in (IN, OUT))
    module(x).backward(grad)
    expected = grad.double().t() @ x.double()
    assert relative_error(module.weight.main_grad, expected) < 1e-6
    assert relative_error(expected.bfloat16(), expected) > 1e-4  # what rounding would cost


def dropout_step(recompute):
    torch.manual_seed(3)
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 4)
    weight = torch.randn(IN, IN, device="cuda", requires_grad=True)
    x = torch.randn(32, IN, device="cuda", requires_grad=True)

    def block(x):
        x = F.dropout(x @ weight, 0.3)
        with tracker.fork():
            return F.dropout(x, 0.3).sin()

    run = checkpoint if recompute else lambda function, x, **_: function(x)
    out = run(block, x, get_rng_state_tracker=lambda: tracker)
    out.square().sum().backward()
    return out, x.grad, weight.grad, torch.rand(4, device="cuda"), tracker.get_states()


def test_recompute_repeats_the_gpus_random_numbers():
    *plain, states = dropout_step(recompute=False)
    *again, states_again = dropout_step(recompute=True)
    for given, true in zip(again, plain):
        assert torch.equal(given, true)
    assert torch.equal(*(s["model-parallel-rng"] for s in (states, states_again)))


def offload_step(num_layers):
    """Return gradients and the bytes held for backward, with some layers offloaded."""
    torch.manual_seed(5)
    layers = [LayerNormLinear(1024, 1024) for _ in range(4)]
    context, next_layer = get_cpu_offload_context(num_layers > 0, num_layers, 4, True, False)
    x = torch.randn(4096, 1024, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    out = x
    for layer in layers:
        with context:
            out = F.gelu(layer(out))
        out = next_layer(out)
    held = torch.cuda.memory_allocated() - before
    out.square().mean().backward()
    return [x.grad, *(p.grad for layer in layers for p in layer.parameters())], held


def test_offloaded_activations_leave_the_gpu_and_come_back():
    plain, held = offload_step(0)
    offloaded, held_less = offload_step(3)
    for given, true in zip(offloaded, plain):
        assert torch.equal(given, true)
    assert held_less < 0.5 * held


@pytest.fixture
def one_rank():
    from megatron.core import parallel_state

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_te_spec_equals_local_spec(one_rank, shape, dtype, limit):
    te = te_model.build("te", shape, params_dtype=dtype).to(dtype).cuda()
    local = te_model.build("local", shape, params_dtype=dtype).to(dtype).cuda()
    weights = {te_model.local_name(name): param for name, param in te.named_parameters()}
    for name, param in local.named_parameters():
        param.data.copy_(weights[name])
    assert relative_error(te_model.step(te), te_model.step(local)) < limit
    expected = te_model.gradients(local)
    for name, grad in te_model.gradients(te).items():
        assert relative_error(grad, expected[te_model.local_name(name)]) < limit
