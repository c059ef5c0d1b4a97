"""Norms of queries and keys, fused with the rotation, give Megatron's numbers in a whole model."""

import functools

import torch

import mindspeed
from tests.distributed.te_model import BATCH, LAYERS, SEQUENCE, VOCAB, build, gradients, step
from tests.ranks import run_ranks

FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def documents_step(model):
    """Run one row of three documents."""
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [3, 8, 5]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    sides = {f"cu_seqlens_{side}": bounds for side in ("q", "kv")}
    sides |= {f"max_seqlen_{side}": max(lengths) for side in ("q", "kv")}
    tokens = torch.arange(BATCH * SEQUENCE)[None] * 5 % VOCAB
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = PackedSeqParams(qkv_format="thd", **sides)
    losses = model(tokens, positions, None, labels=tokens.roll(1), packed_seq_params=packed)
    losses.mean().backward()
    return losses.detach()


def counted(calls, function):
    def call(*args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)

    return call


def compare(spec, run=step, prepare=None, features=None, shape="llama", **options):
    """Compare a step with plain Megatron's; return how often the operator ran in forward."""
    from mindspeed.ops.norm_rotate_qkv import megatron

    options = {"qk_layernorm": True} | options
    mindspeed.enable()
    plain, fused = (build(spec, shape, **options) for _ in range(2))
    torch.manual_seed(7)
    for name, weight in plain.named_parameters():
        if "q_layernorm" in name or "k_layernorm" in name:
            weight.data.uniform_(-1.5, 1.5)
    fused.load_state_dict(plain.state_dict())
    wanted, wanted_grads = run(plain), gradients(plain)
    mindspeed.enable(use_fused_rotary_pos_emb=True, **(features or {}))
    if prepare is not None:
        prepare(fused)
    operator, calls = megatron.norm_rotate_qkv, []
    megatron.norm_rotate_qkv = counted(calls, operator)
    try:
        torch.testing.assert_close(run(fused), wanted, rtol=1e-6, atol=1e-6)
    finally:
        megatron.norm_rotate_qkv = operator
        mindspeed.enable()
    for name, grad in gradients(fused).items():
        error = (grad - wanted_grads[name]).norm() / wanted_grads[name].norm()
        assert error < 1e-6, (name, float(error))
    return len(calls) / LAYERS


def hooked(model):
    for layer in model.decoder.layers:
        layer.self_attention.k_layernorm.register_forward_hook(lambda *_: None)


def waiting(model, waits):
    """Register what Megatron's DDP registers to wait for weights."""

    def hook(module, *_):
        waits.append(module)

    hook.__module__ = "megatron.core.distributed.distributed_data_parallel"
    for layer in model.decoder.layers:
        for norm in (layer.self_attention.q_layernorm, layer.self_attention.k_layernorm):
            norm.register_forward_pre_hook(hook)


def on_one_rank():
    waits = []
    found = {
        "te": compare("te"),
        "te documents": compare("te", documents_step),
        "local": compare("local"),
        "local fused norm": compare("local", features={"use_fused_rmsnorm": True}),
        "gamma less one": compare("te", layernorm_zero_centered_gamma=True),
        "recomputed": compare("te", **FULL_RECOMPUTE),
        "waiting": compare("te", prepare=functools.partial(waiting, waits=waits)),
        "hooked": compare("te", prepare=hooked),
        "layer norm": compare("te", shape="gpt2", num_query_groups=2),
        "interleaved": compare("te", rotary_interleaved=True),
    }
    return found, len(waits)


def test_one_rank():
    ((found, waits),) = run_ranks(on_one_rank, 1)
    fused = dict.fromkeys(found, 1) | {"recomputed": 2}
    fused |= {"hooked": 0, "layer norm": 0, "interleaved": 0}
    assert found == fused
    assert waits == 2 * LAYERS


def on_tensor_parallel_ranks():
    cases = [(run, sp) for run in (step, documents_step) for sp in (False, True)]
    return [compare("te", run, tp=2, sequence_parallel=sp) for run, sp in cases]


def test_tensor_parallel_with_and_without_sequence_parallel():
    assert run_ranks(on_tensor_parallel_ranks, 2) == [[1.0] * 4] * 2
