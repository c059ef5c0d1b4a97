"""Flash attention and fused rotary embedding give Megatron's own numbers in a whole model."""

import pytest
import torch

import mindspeed
from tests.distributed.one_step import step
from tests.ranks import run_ranks


def build(spec, **options):
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    ranks = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=ranks,
        **options,
    )
    qk_norm = {"qk_layernorm": options.pop("qk_layernorm", False)}
    local, te = get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
    layer = local(**qk_norm) if spec == "local" else te(**qk_norm)
    return GPTModel(
        config, layer, vocab_size=32, max_sequence_length=8, position_embedding_type="rope"
    )


def scores_held(model):
    """Count the S x S matrices that autograd keeps."""
    held = []
    keep = lambda t: held.append(t.shape) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        step(model)
    return sum(shape[-2:] == (8, 8) for shape in held)


def compare(spec, options):
    plain = build(spec, **options)
    expected = step(plain)
    mindspeed.enable(use_flash_attn=True, use_fused_rotary_pos_emb=True)
    assert {"flash_attention", "fused_rotary"} <= set(mindspeed.report().on)
    fused = build(spec, **options)
    fused.load_state_dict(plain.state_dict())
    for found, wanted in zip(step(fused), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-7)
    assert not getattr(fused.config, "fused_single_qkv_rope", False)
    if spec == "local":
        with_flash = scores_held(fused)
        mindspeed.enable()
        assert with_flash == 0 < scores_held(plain)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("local", {}),
        ("local", {"qk_layernorm": True}),
        ("local", {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}),
        ("te", {}),
        ("te", {"qk_layernorm": True}),
    ],
    ids=str,
)
def test_model(spec, options):
    run_ranks(compare, 1, spec, options)


def test_tensor_parallel():
    run_ranks(compare, 2, "te", {})


def packed_ways(spec):
    """Count how often the packed tensor is turned in one piece, and the heads one by one."""
    from megatron.core.transformer import attention

    from mindspeed.ops.rotary_position_embedding import megatron

    mindspeed.enable(use_fused_rotary_pos_emb=True)
    model = build(spec)
    counts = {"packed": 0, "apart": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    megatron.rotate_qkv = counted("packed", megatron.rotate_qkv)
    attention.apply_rotary_pos_emb = counted("apart", attention.apply_rotary_pos_emb)
    step(model)
    model.config.rotary_interleaved = True
    step(model)
    return counts


@pytest.mark.parametrize("spec", ["local", "te"])
def test_the_packed_tensor_is_turned_in_one_piece(spec):
    assert run_ranks(packed_ways, 1, spec) == [{"packed": 2, "apart": 4}]


def patched_split():
    """Compare a model whose way to get queries, keys and values was changed by somebody else."""
    from megatron.core.transformer.attention import SelfAttention

    original = SelfAttention.get_query_key_value_tensors

    def doubled(self, *args, **kwargs):
        query, key, value = original(self, *args, **kwargs)
        return 2 * query, key, value

    SelfAttention.get_query_key_value_tensors = doubled
    plain = build("te")
    expected = step(plain)
    mindspeed.enable(use_fused_rotary_pos_emb=True)
    fused = build("te")
    fused.load_state_dict(plain.state_dict())
    for found, wanted in zip(step(fused), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-7)


def test_a_changed_split_is_kept():
    run_ranks(patched_split, 1)


def documents_step(model, is_shared):
    """Return the loss and the gradients of one row of two documents."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    options = {"cu_seqlens_kv": bounds if is_shared else bounds.clone(), "max_seqlen_kv": 5}
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, max_seqlen_q=5, **options)
    tokens = torch.arange(8).reshape(1, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    labels = tokens.roll(1, -1)
    loss = model(tokens, positions, None, labels=labels, packed_seq_params=packed).mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def compare_documents():
    from megatron.core.transformer import attention

    plain = build("te")
    expected = documents_step(plain, True)
    mindspeed.enable(use_fused_rotary_pos_emb=True)
    function, apart = attention.apply_rotary_pos_emb, []
    attention.apply_rotary_pos_emb = lambda *a, **k: apart.append(1) or function(*a, **k)
    counts = []
    for is_shared in (True, False):
        fused = build("te")
        fused.load_state_dict(plain.state_dict())
        for found, wanted in zip(documents_step(fused, is_shared), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-7)
        counts.append(len(apart))
    step(fused)
    for layer in fused.decoder.layers:
        assert "get_query_key_value_tensors" not in vars(layer.self_attention)
    return counts


def test_the_packed_tensor_of_documents_is_turned_in_one_piece():
    assert run_ranks(compare_documents, 1) == [[0, 4]]
