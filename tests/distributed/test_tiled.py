"""MLP and loss over tiles of the sequence: float64 gradients to 1e-12, from the predicted bytes."""

import pytest
import torch

import mindspeed
from tests.distributed import te_model
from tests.ranks import run_ranks

TILES = {"tiled_mlp_size": 3, "tiled_loss_size": 3}  # of 8 positions: the last tile is shorter
TOKENS = te_model.SEQUENCE * te_model.BATCH
WIDTH = 8  # bytes of float64


def _run(shape, features, spec="te", **options):
    """Return loss, gradients by name, and the bytes that autograd keeps after a forward pass."""
    from tests.gpt.saved import SavedTensors

    mindspeed.enable(linear_cross_entropy=True, **features)
    model = te_model.build(spec, shape, params_dtype=torch.float64, **options).double()
    kept = []
    with SavedTensors(model.parameters()) as saved:
        hook = model.register_forward_hook(lambda *_: kept.append(saved.kept()))
        losses = te_model.step(model)
        hook.remove()
    found = te_model.gathered(model, te_model.gradients(model))
    return losses, found, sum(k.bytes for k in kept[0] if k.dtype.is_floating_point)


def _assert_close(ours, plain):
    assert torch.allclose(ours[0], plain[0], rtol=0, atol=1e-12)
    assert ours[1].keys() == plain[1].keys()
    for name, expected in plain[1].items():
        torch.testing.assert_close(ours[1][name], expected, rtol=0, atol=1e-12, msg=name)


ONE_RANK = {
    "mlp": ("llama", {"tiled_mlp_size": 3}, {}),
    "loss": ("llama", {"tiled_loss_size": 3}, {}),
    "both": ("llama", TILES, {}),
    "biases": ("gpt2", TILES, {}),
    "one position": ("llama", {"tiled_mlp_size": 1, "tiled_loss_size": 1}, {}),
    "longer than the sequence": ("llama", {"tiled_mlp_size": 9, "tiled_loss_size": 8}, {}),
    "norms recomputed": ("llama", TILES | {"recompute_norm": True}, {}),
    "fused": ("llama", TILES | {"use_fused_swiglu": True, "use_fused_residual_norm": True}, {}),
    "layers recomputed": (
        "llama",
        TILES,
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    ),
    "local spec": ("llama", TILES, {"spec": "local"}),
}


def _one_rank():
    results = {}
    for name, (shape, features, options) in ONE_RANK.items():
        results[name] = [_run(shape, each, **options) for each in ({}, features)]
    return results


@pytest.fixture(scope="module")
def one_rank():
    return run_ranks(_one_rank, 1)[0]


@pytest.mark.parametrize("name", ONE_RANK)
def test_gradients(name, one_rank):
    _assert_close(*reversed(one_rank[name]))


def test_kept_bytes(one_rank):
    """An MLP keeps its input, which the residual sum keeps anyhow; the loss its hidden states."""
    hidden, ffn, vocabulary = te_model.HIDDEN, 4 * te_model.HIDDEN, te_model.VOCAB

    def saved(name):
        plain, ours = one_rank[name]
        return plain[2] - ours[2]

    # The unfused SwiGLU of this run keeps fc1's output (2 F), silu of the gate and the product; the
    # norm inside of fc1 its output and one number a token.
    offset = hasattr(_config_class(), "glu_linear_offset")  # newer releases add it to `up`
    mlp = te_model.LAYERS * WIDTH * TOKENS * (ffn * (4 + offset) + hidden + 1)
    assert saved("mlp") == pytest.approx(mlp, abs=te_model.LAYERS * WIDTH * TOKENS)
    # Logits as probabilities of all tokens, in float64.
    assert saved("loss") >= WIDTH * TOKENS * vocabulary
    assert saved("both") == saved("mlp") + saved("loss")
    assert saved("one position") == saved("both")
    assert saved("longer than the sequence") == 0


def _config_class():
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig


def _with_a_hook():
    from mindspeed.config import RankConfigError

    mindspeed.enable(linear_cross_entropy=True, **TILES)
    model = te_model.build("te", "llama", params_dtype=torch.float64).double()
    model.output_layer.register_forward_hook(lambda *_: None)
    with pytest.raises(
        RankConfigError, match="needs an output layer that is one plain GEMM"
    ) as error:
        te_model.step(model)
    return "\n" in str(error.value)


def test_an_output_layer_with_a_hook_is_one_line():
    assert run_ranks(_with_a_hook, 1) == [False]


TWO_RANKS = {"tp": {"tp": 2}, "sp": {"tp": 2, "sequence_parallel": True}}


def _two_ranks():
    return {
        name: [_run("llama", each, **options) for each in ({}, TILES)]
        for name, options in TWO_RANKS.items()
    }


def test_tensor_and_sequence_parallel_ranks():
    for rank in run_ranks(_two_ranks, 2):
        for plain, ours in rank.values():
            _assert_close(ours, plain)
            assert ours[2] < plain[2]


def _with_adapters():
    """Train adapters of all linears beside frozen weights, plain and tiled."""
    found = []
    for features in ({}, TILES):
        mindspeed.enable(linear_cross_entropy=True, **features)
        model = te_model.build("te", "llama", params_dtype=torch.float64).double()
        for parameter in model.parameters():
            parameter.requires_grad = False
        torch.manual_seed(5)
        for layer in model.decoder.layers:
            layer.self_attention.linear_qkv.weight.requires_grad = True
            for linear in (layer.mlp.linear_fc1, layer.mlp.linear_fc2):
                _add_adapter(linear)
        te_model.step(model)
        named = model.named_parameters()
        found.append({name: p.grad for name, p in named if p.requires_grad})
    return found


def _add_adapter(linear):
    """Add a low-rank product to a linear's output, as an adapter does."""
    down = torch.nn.Parameter(torch.randn(2, linear.weight.shape[1], dtype=torch.float64))
    up = torch.nn.Parameter(torch.randn(linear.weight.shape[0], 2, dtype=torch.float64))
    linear.register_parameter("down", down)
    linear.register_parameter("up", up)
    linear.register_forward_hook(
        lambda _, args, out: (out[0] + args[0] @ down.t() @ up.t(), out[1])
    )


def test_adapters_beside_frozen_weights():
    plain, ours = run_ranks(_with_adapters, 1)[0]
    assert plain.keys() == ours.keys() and any("down" in name for name in plain)
    for name, expected in plain.items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=1e-12, msg=name)
