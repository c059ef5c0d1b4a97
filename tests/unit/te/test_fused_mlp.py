"""Which MLPs run as one path."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import gelu, silu

from mindspeed.device.hopper import QUACK
from mindspeed.ops.swiglu import gemm_swiglu
from mindspeed.te import fused_mlp
from mindspeed.te.pytorch.module import Linear
from tests.unit.ops import kernel_files, quack_stand_in

CONFIG = {
    "cpu_offloading": False,
    "gated_linear_unit": True,
    "activation_func": silu,
    "bias_activation_fusion": True,
    "add_bias_linear": False,
    "activation_func_fp8_input_store": False,
}


class Mlp(torch.nn.Module):
    """As Megatron's, as far as the fused path reads it."""

    @fused_mlp.wrap_mlp_init
    def __init__(self, **changes):
        super().__init__()
        self.config = SimpleNamespace(**CONFIG | changes)
        options = {"bias": self.config.add_bias_linear, "params_dtype": torch.float64}
        self.linear_fc1 = Linear(16, 16, **options)
        self.linear_fc2 = Linear(8, 16, **options)

    @fused_mlp.wrap_mlp_forward
    def forward(self, x, per_token_scale=None):
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(silu(gate) * up), None


@pytest.fixture(autouse=True)
def _socket(monkeypatch):
    monkeypatch.setattr(fused_mlp, "_socket_forwards", lambda: {Linear.forward})


def run(mlp):
    torch.manual_seed(1)
    x = torch.randn(3, 2, 16, dtype=torch.float64, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out, bias = mlp(x)
    assert bias is None
    out.square().sum().backward()
    shapes = {tuple(tensor.shape) for tensor in kept}
    return shapes, [out, x.grad, *(weight.grad for weight in mlp.parameters())]


def test_an_mlp_keeps_no_activation_and_equals_megatrons():
    torch.manual_seed(0)
    mlp = Mlp()
    assert mlp.fused_linears == (Linear, Linear)
    fused_shapes, fused = run(mlp)
    mlp.zero_grad()
    mlp.fused_linears = None
    plain_shapes, plain = run(mlp)
    assert (3, 2, 8) not in fused_shapes and (3, 2, 8) in plain_shapes
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"gated_linear_unit": False},
        {"activation_func": gelu},
        {"bias_activation_fusion": False},
        {"add_bias_linear": True},
        {"activation_func_fp8_input_store": True},
        {"use_te_activation_func": True},
        {"cpu_offloading": True, "cpu_offloading_activations": True},
    ],
    ids=str,
)
def test_other_mlps_stay_megatrons(changes):
    assert Mlp(**changes).fused_linears is None


def test_the_path_is_chosen_when_an_mlp_is_built():
    """Neither the config nor a feature that is switched later changes an MLP that exists."""
    torch.manual_seed(0)
    mlp = Mlp()
    mlp.config.activation_func = gelu
    shapes, _ = run(mlp)
    assert (3, 2, 8) not in shapes
    copied = copy.deepcopy(mlp)
    assert copied.fused_linears == (Linear, Linear)


@pytest.mark.parametrize("is_asked", [False, True])
def test_swiglu_in_the_epilogue_belongs_to_the_mlp(is_asked):
    class Asked(Mlp):
        __init__ = fused_mlp.wrap_mlp_init_in_epilogue(Mlp.__init__)

    other, mlp = Mlp(), (Asked if is_asked else Mlp)()
    asked = []
    for each in (other, mlp):
        original = each.linear_fc1.linear_swiglu
        each.linear_fc1.linear_swiglu = lambda x, in_epilogue, original=original: (
            asked.append(in_epilogue) or original(x, in_epilogue=in_epilogue)
        )
        run(each)
    assert asked == [False, is_asked]


def test_weights_per_token_stay_megatrons():
    torch.manual_seed(0)
    mlp = Mlp()
    mlp.linear_fc1.linear_swiglu = lambda *_, **__: pytest.fail("the fused path was taken")
    mlp(torch.randn(3, 2, 16, dtype=torch.float64), torch.ones(3, 2))


def test_an_mlp_is_compiled_whole():
    torch.manual_seed(0)
    x, mlp = torch.randn(3, 2, 16, dtype=torch.float64), Mlp()
    expected = mlp(x)[0]
    weights = [(name, weight.detach()) for name, weight in mlp.named_parameters()]
    for name, weight in weights:  # what the compiler sees of linears is not tested here
        linear = torch.nn.Linear(*weight.t().shape, bias=False, dtype=torch.float64)
        linear.weight.data = weight
        setattr(mlp, name.partition(".")[0], linear)
    compiled = torch.compile(mlp, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x)[0], expected, rtol=1e-12, atol=1e-12)


def test_kernels_of_an_mlp_are_compiled_while_others_are_built(monkeypatch, tmp_path):
    class InEpilogue(Mlp):
        @fused_mlp.wrap_mlp_init_in_epilogue
        def __init__(self, **changes):
            super().__init__(**changes)
            self.linear_fc1.params_dtype = torch.bfloat16

    quack_stand_in.install(monkeypatch)
    kernel_files.keep(monkeypatch, tmp_path)
    gemm_swiglu.prepare.cache_clear()
    InEpilogue(bias_activation_fusion=False)
    assert not list(tmp_path.iterdir())
    InEpilogue()
    kernels = gemm_swiglu._trial_kernels(torch.bfloat16, gemm_swiglu.TILES_N[0])
    assert kernel_files.started(QUACK, kernels) == kernels
    gemm_swiglu.prepare.cache_clear()
