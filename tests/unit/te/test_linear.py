"""Linear and LayerNormLinear on one rank."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F

from mindspeed.te.pytorch import LayerNormLinear, Linear

IN, OUT = 12, 20


def fill(module):
    torch.manual_seed(3)
    for param in module.parameters():
        torch.nn.init.normal_(param)
    return module


def check(module, x, reference, tolerance=1e-12):
    """Compare output and all gradients of module(x) with reference(x, parameters by name)."""
    x.requires_grad_()
    out = module(x)
    grad = torch.randn_like(out)
    out.backward(grad)
    names = [name for name, _ in module.named_parameters()]
    values = [t.detach().double().requires_grad_() for t in (x, *module.parameters())]
    expected = reference(values[0], dict(zip(names, values[1:])))
    expected.backward(grad.double())
    close = dict(rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.double(), expected, **close)
    for name, given, true in zip(["x", *names], [x, *module.parameters()], values):
        report = f"gradient of {name}: {{}}".format
        torch.testing.assert_close(given.grad.double(), true.grad, **close, msg=report)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", [None, "column", "row"])
def test_linear_equals_torch(mode, bias):
    module = fill(Linear(IN, OUT, bias=bias, parallel_mode=mode, params_dtype=torch.float64))
    check(
        module,
        torch.randn(5, 3, IN, dtype=torch.float64),
        lambda x, p: F.linear(x, p["weight"], p.get("bias")),
    )


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_layernorm_linear_equals_torch(normalization, zero_centered):
    module = fill(
        LayerNormLinear(
            IN,
            OUT,
            eps=1e-3,
            normalization=normalization,
            zero_centered_gamma=zero_centered,
            params_dtype=torch.float64,
        )
    )
    names = {"weight", "bias", "layer_norm_weight", "layer_norm_bias"}
    if normalization == "RMSNorm":
        names.remove("layer_norm_bias")
    assert {name for name, _ in module.named_parameters()} == names

    def reference(x, p):
        gamma = p["layer_norm_weight"] + zero_centered
        if normalization == "RMSNorm":
            normed = F.rms_norm(x, (IN,), gamma, 1e-3)
        else:
            normed = F.layer_norm(x, (IN,), gamma, p["layer_norm_bias"], 1e-3)
        return F.linear(normed, p["weight"], p["bias"])

    check(module, torch.randn(5, 3, IN, dtype=torch.float64), reference)


def test_return_bias_leaves_the_bias_to_the_caller():
    module = fill(Linear(IN, OUT, return_bias=True))
    x = torch.randn(4, IN)
    out, bias = module(x, is_first_microbatch=True)
    torch.testing.assert_close(out, x @ module.weight.t())
    assert torch.equal(bias, module.bias)
    assert Linear(IN, OUT, bias=False, return_bias=True)(x)[1] is None


def test_layernorm_output_comes_last():
    module = fill(LayerNormLinear(IN, OUT, return_bias=True, return_layernorm_output=True))
    x = torch.randn(4, IN)
    out, bias, normed = module(x)
    expected = F.layer_norm(x, (IN,), module.layer_norm_weight, module.layer_norm_bias, 1e-5)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(out, expected @ module.weight.t())
    assert torch.equal(bias, module.bias)


@pytest.mark.parametrize("split", [("q_", "k_"), {"q_": 15, "k_": 5}])
def test_parameters_split_is_one_gemm(split):
    module = fill(Linear(IN, OUT, parameters_split=split, params_dtype=torch.float64))
    assert [n for n, _ in module.named_parameters()] == ["q_weight", "q_bias", "k_weight", "k_bias"]
    check(
        module,
        torch.randn(4, IN, dtype=torch.float64),
        lambda x, p: F.linear(
            x, torch.cat([p["q_weight"], p["k_weight"]]), torch.cat([p["q_bias"], p["k_bias"]])
        ),
    )


def test_bad_arguments_say_what_to_do():
    with pytest.raises(ValueError, match="does not add up to 20"):
        Linear(IN, OUT, parameters_split={"q_": 3})
    with pytest.raises(ValueError, match="neither fuse_wgrad_accumulation"):
        Linear(IN, OUT, parameters_split=("q_", "k_"), fuse_wgrad_accumulation=True)
    with pytest.raises(ValueError, match="use None, 'column' or 'row'"):
        Linear(IN, OUT, parallel_mode="diagonal")
    with pytest.raises(ValueError, match="set tp_comm_overlap=False"):
        Linear(IN, OUT, ub_overlap_ag=True, ub_name="fc1")
    with pytest.raises(ValueError, match="out_features=20 does not split over 3 ranks"):
        Linear(IN, OUT, parallel_mode="column", tp_size=3)
    with pytest.raises(ValueError, match="use 'LayerNorm' or 'RMSNorm'"):
        LayerNormLinear(IN, OUT, normalization="BatchNorm")
    with pytest.raises(TypeError, match="of_the_future"):
        Linear(IN, OUT, of_the_future=True)


def test_a_shard_without_its_group_says_so():
    module = Linear(IN, OUT, parallel_mode="column", tp_size=2)
    assert module.weight.shape == (OUT // 2, IN)
    with pytest.raises(RuntimeError, match=r"call set_tensor_parallel_group\(\)"):
        module(torch.randn(2, IN))


def test_mixed_input_is_cast_to_the_weights_type():
    module = fill(Linear(IN, OUT, params_dtype=torch.bfloat16))
    out = module(torch.randn(3, IN))
    assert out.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Linear(IN, OUT)(torch.randn(3, IN)).dtype == torch.bfloat16


def attributes(param):
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
    return {name: getattr(param, name) for name in names if hasattr(param, name)}


def test_parameters_are_marked_as_megatrons_own_layers_mark_them():
    sharded = {"tensor_model_parallel": True, "partition_stride": 1}
    column = Linear(IN, OUT, parallel_mode="column", tp_size=2, sequence_parallel=True)
    assert attributes(column.weight) == {**sharded, "partition_dim": 0}
    assert attributes(column.bias) == {**sharded, "partition_dim": 0}
    row = Linear(IN, OUT, parallel_mode="row", tp_size=2, sequence_parallel=True)
    assert attributes(row.weight) == {**sharded, "partition_dim": 1}
    assert attributes(row.bias) == {"sequence_parallel": True}
    normed = LayerNormLinear(IN, OUT, parallel_mode="column", tp_size=2, sequence_parallel=True)
    assert attributes(normed.layer_norm_weight) == {"sequence_parallel": True}
    assert attributes(normed.layer_norm_bias) == {"sequence_parallel": True}


def test_a_replicated_weight_is_no_shard():
    # Megatron counts a shard on every rank for the gradient norm, and a copy once.
    copy = Linear(IN, OUT, rng_tracker_name="data-parallel-rng")
    assert copy.weight.tensor_model_parallel is False
    expert = Linear(IN, OUT, rng_tracker_name="expert-parallel-rng")
    assert expert.weight.tensor_model_parallel is True


def test_meta_parameters_become_real_and_keep_their_marks():
    module = Linear(IN, OUT, device="meta", init_method=torch.nn.init.ones_)
    assert module.weight.is_meta
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(OUT, IN))
    assert torch.equal(module.bias, torch.zeros(OUT))
    assert module.weight.partition_dim == 0


def test_extra_state_is_empty_optional_and_tolerant(caplog):
    module = Linear(IN, OUT)
    state = module.state_dict()
    assert list(state) == ["weight", "bias", "_extra_state"]
    assert state["_extra_state"].numel() == 0
    module.load_state_dict({"weight": module.weight, "bias": module.bias}, strict=True)
    module.load_state_dict({**state, "_extra_state": None}, strict=True)
    assert not caplog.records
    module.load_state_dict({**state, "_extra_state": torch.ones(9, dtype=torch.uint8)})
    assert "FP8 scales in the checkpoint are ignored" in caplog.text


def with_factors(size_in, size_out):
    module = Linear(size_in, size_out, bias=False, params_dtype=torch.float64)
    fill(module)
    module.requires_grad_(False)
    inner, outer = torch.randn(3, size_in).double(), torch.randn(size_out, 3).double()
    module.low_rank = lambda: (inner.clone(), outer.clone())
    return module, inner, outer


@pytest.mark.parametrize("sizes", [(6, 10), (10, 6), (8, 8)], ids=str)
def test_a_weight_beside_factors_can_be_saved_loaded_moved_and_copied(sizes):
    module, inner, outer = with_factors(*sizes)
    x = torch.randn(5, sizes[0]).double()

    def is_right(module, values, tolerance=1e-12):
        values = values.double() + outer @ inner
        found = module(x.to(module.weight.dtype)).double()
        return torch.allclose(found, x @ values.t(), rtol=tolerance, atol=tolerance)

    first, second = module.weight.clone(), torch.randn(sizes[::-1]).double()
    assert is_right(module, first) and module._buffered.holds(module.weight, 3)
    stored = io.BytesIO()
    torch.save(module.state_dict(), stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored, weights_only=True)["weight"], first)
    twin = copy.deepcopy(module)
    assert twin._buffered is None, "a copy would hold its weight twice"
    module.load_state_dict({"weight": second})
    assert is_right(module, second) and is_right(twin, first)
    module.weight.data = first
    assert is_right(module, first)
    module.load_state_dict({"weight": second}, assign=True)
    module.requires_grad_(False)
    assert is_right(module, second)
    assert module._buffered is not None and module.float()._buffered is None
    assert is_right(module, second, 1e-4)
    module.low_rank = None
    assert torch.allclose(module(x.float()), x.float() @ module.weight.t(), atol=1e-5)


def test_a_weight_beside_factors_is_trained_with_after_inference():
    module, inner, outer = with_factors(6, 10)
    x = torch.randn(5, 6).double().requires_grad_()
    with torch.inference_mode():
        module(x)
    outer.requires_grad_()
    module(x).sum().backward()
    values = module.weight + (outer @ inner).detach()
    assert torch.allclose(x.grad, values.sum(0).expand_as(x))
    assert torch.allclose(outer.grad, (x @ inner.t()).sum(0).expand_as(outer))
