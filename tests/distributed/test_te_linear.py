"""Megatron's Transformer Engine layers on mindspeed.te against Megatron's own layers, two ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

SEQUENCE, BATCH, IN, OUT = 6, 2, 8, 12


def draws(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def start(**options):
    """Make two tensor-parallel ranks and return Megatron's config of one small float64 layer."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    return TransformerConfig(
        num_layers=1,
        hidden_size=IN,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        params_dtype=torch.float64,
        init_method=torch.nn.init.normal_,
        **options,
    )


def build(kind, config, **sizes):
    """Build one layer from the same random state every time, with random biases."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(11)
    place = {"gather_output": False} if "Column" in kind.__name__ else {"input_is_parallel": True}
    layer = kind(
        sizes.get("input_size", IN),
        sizes.get("output_size", OUT),
        config=config,
        init_method=config.init_method,
        bias=True,
        skip_bias_add=sizes.get("skip_bias_add", False),
        is_expert=False,
        **place,
    )
    with torch.no_grad():
        if layer.bias.shape[0] == OUT:
            layer.bias.copy_(draws(5, OUT))
        else:
            layer.bias.copy_(draws(5, OUT).chunk(2)[dist.get_rank()])
    return layer


def run(layer, x, grad):
    """Return output and gradients by name."""
    x = x.clone().requires_grad_()
    out, _ = layer(x)
    out.backward(grad)
    grads = {name: param.grad for name, param in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **grads}


def assert_same(ours, theirs, tolerance=1e-12):
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=tolerance, atol=tolerance, msg=f"{name}: {{}}".format
        )


def column_and_row(sequence_parallel):
    """Compare both kinds on this rank and return what rank-independent checks need."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TERowParallelLinear,
    )
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    config = start(sequence_parallel=sequence_parallel)
    rank = dist.get_rank()

    def part(x, dim):
        return x.chunk(2, dim)[rank] if dim is not None else x

    along_sequence = 0 if sequence_parallel else None
    results = {}
    for name, ours, theirs, x_dim, out_dim in (
        ("column", TEColumnParallelLinear, ColumnParallelLinear, along_sequence, -1),
        ("row", TERowParallelLinear, RowParallelLinear, -1, along_sequence),
    ):
        mine, reference = build(ours, config), build(theirs, config)
        assert torch.equal(mine.weight, reference.weight)  # the same draws from the tracker
        for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            expected = getattr(reference.weight, attribute)
            assert getattr(mine.weight, attribute) == expected
        given = getattr(mine.bias, "sequence_parallel", False)
        assert given == getattr(reference.bias, "sequence_parallel", False)
        x, grad = draws(1, SEQUENCE, BATCH, IN), draws(2, SEQUENCE, BATCH, OUT)
        x, grad = part(x, x_dim), part(grad, out_dim)
        results[name] = run(mine, x, grad)
        assert_same(results[name], run(reference, x, grad))
        results[name]["whole weight"] = mine.weight.detach()
    return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_and_row_equal_megatrons_and_the_whole_layer(sequence_parallel):
    ranks = run_ranks(column_and_row, 2, sequence_parallel)

    def whole(kind, name, dim):
        parts = [rank[kind][name] for rank in ranks]
        return parts[0] if dim is None else torch.cat(parts, dim)

    sequence = 0 if sequence_parallel else None
    for kind, dims in {
        "column": {"out": -1, "x": sequence, "weight": 0, "bias": 0},
        "row": {"out": sequence, "x": -1, "weight": 1, "bias": None},
    }.items():
        weight = whole(kind, "whole weight", dims["weight"]).requires_grad_()
        bias = draws(5, OUT).requires_grad_()
        x = draws(1, SEQUENCE, BATCH, IN).requires_grad_()
        out = x @ weight.t() + bias
        out.backward(draws(2, SEQUENCE, BATCH, OUT))
        expected = {"out": out.detach(), "x": x.grad, "weight": weight.grad, "bias": bias.grad}
        given = {name: whole(kind, name, dim) for name, dim in dims.items()}
        if kind == "row" and sequence_parallel:  # each rank saw half of the tokens
            given["bias"] = sum(rank[kind]["bias"] for rank in ranks)
        assert_same(given, expected)


def norm_and_column(normalization, zero_centered):
    """Compare the fused layer with Megatron's norm formula followed by its column layer."""
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear
    from megatron.core.tensor_parallel import ColumnParallelLinear

    config = start(
        sequence_parallel=True,
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centered,
    )
    fused = build(TELayerNormColumnParallelLinear, config)
    plain = build(ColumnParallelLinear, config)
    gamma = torch.nn.init.normal_(fused.layer_norm_weight).detach().clone().requires_grad_()
    assert fused.layer_norm_weight.sequence_parallel
    x = draws(1, SEQUENCE, BATCH, IN).chunk(2)[dist.get_rank()]
    grad = draws(2, SEQUENCE, BATCH, OUT).chunk(2, -1)[dist.get_rank()]
    ours = run(fused, x, grad)

    x = x.clone().requires_grad_()
    centred = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
    spread = torch.sqrt(centred.square().mean(-1, keepdim=True) + config.layernorm_epsilon)
    beta = torch.zeros(IN, dtype=torch.float64, requires_grad=True)
    out, _ = plain(centred / spread * (gamma + zero_centered) + beta)
    out.backward(grad)
    theirs = {"out": out.detach(), "x": x.grad, "layer_norm_weight": gamma.grad}
    if normalization == "LayerNorm":
        theirs["layer_norm_bias"] = beta.grad
    grads = {name: param.grad for name, param in plain.named_parameters()}
    assert_same(ours, {**theirs, **grads})


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norm_and_column_equal_their_parts(normalization, zero_centered):
    run_ranks(norm_and_column, 2, normalization, zero_centered)


def fused_gradients():
    """Accumulate three microbatches into main_grad and compare with autograd's own sums."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    plain = build(TEColumnParallelLinear, start(sequence_parallel=True))
    fused = build(TEColumnParallelLinear, plain.config)
    fused.fuse_wgrad_accumulation = True
    fused.weight.main_grad = torch.zeros_like(fused.weight)
    fused.weight.grad_added_to_main_grad = False
    rank = dist.get_rank()
    for microbatch in range(3):
        x = draws(20 + microbatch, SEQUENCE, BATCH, IN).chunk(2)[rank]
        grad = draws(30 + microbatch, SEQUENCE, BATCH, OUT).chunk(2, -1)[rank]
        theirs = run(plain, x, grad)
        ours = run(fused, x, grad)
        assert fused.weight.grad_added_to_main_grad
        fused.weight.grad = None
        del ours["weight"], theirs["weight"]
        assert_same(ours, theirs)
    torch.testing.assert_close(fused.weight.main_grad, plain.weight.grad, rtol=1e-12, atol=1e-12)


def test_main_grad_equals_autograds_sum():
    run_ranks(fused_gradients, 2)


def gathered_norm():
    from mindspeed.te.pytorch import LayerNormLinear

    layer = LayerNormLinear(
        IN,
        OUT,
        bias=False,
        parallel_mode="column",
        tp_group=dist.group.WORLD,
        tp_size=2,
        sequence_parallel=True,
        params_dtype=torch.float64,
        return_layernorm_output=True,
        return_layernorm_output_gathered=True,
    )
    x = draws(1, SEQUENCE, IN).chunk(2)[dist.get_rank()].requires_grad_()
    _, normed = layer(x)
    normed.backward(draws(40 + dist.get_rank(), SEQUENCE, IN))
    return normed.detach(), x.grad


def test_the_gathered_norm_is_whole_and_its_gradient_comes_back():
    ranks = run_ranks(gathered_norm, 2)
    x = draws(1, SEQUENCE, IN).requires_grad_()
    expected = torch.nn.functional.layer_norm(x, (IN,))
    expected.backward(draws(40, SEQUENCE, IN) + draws(41, SEQUENCE, IN))
    for normed, _ in ranks:
        torch.testing.assert_close(normed, expected.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in ranks]), x.grad)


def distributed_recompute():
    """Recompute from pieces of the input, with dropout from the default and the tracked state."""
    from megatron.core.extensions.transformer_engine import te_checkpoint
    from megatron.core.tensor_parallel.random import (
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
    )

    start()
    weight = draws(3, IN, IN).requires_grad_()

    def block(x, *nothing):
        x = torch.nn.functional.dropout(x @ weight, 0.5)
        with get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(x, 0.5).sin()

    kept, results = [], []
    for recompute in (False, True):
        model_parallel_cuda_manual_seed(11)
        weight.grad = None
        x = draws(1, SEQUENCE, BATCH, IN).requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        )
        if recompute:
            with hooks:
                out = te_checkpoint(
                    block, True, get_cuda_rng_tracker, dist.group.WORLD, x, None, None, None, None
                )
        else:
            out = block(x)
        out.backward(draws(2, SEQUENCE, BATCH, IN))
        results.append([out.detach(), x.grad, weight.grad, torch.rand(3)])
    assert kept == [SEQUENCE * BATCH * IN // 2]
    for given, true in zip(*results):
        assert torch.equal(given, true)


def test_recompute_from_distributed_pieces_is_bitwise_equal():
    run_ranks(distributed_recompute, 2)
