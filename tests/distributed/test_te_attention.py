"""Megatron's Transformer Engine attention on mindspeed.te against Megatron's own attention."""

import pytest
import torch

from tests.ranks import run_ranks

S, B, N, H = 8, 2, 4, 6


def draw(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_()


def configure(tp=1, **options):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(7)
    options = {"attention_dropout": 0.0, "num_query_groups": 2} | options
    return TransformerConfig(
        num_layers=1,
        hidden_size=N * H,
        num_attention_heads=N,
        kv_channels=H,
        tensor_model_parallel_size=tp,
        **options,
    )


def build(kind, config, mask_type):
    return kind(config, layer_number=1, attn_mask_type=mask_type, attention_type="self")


def run(attention, mask, mask_type, groups, seed=0, **kwargs):
    inputs = [draw(seed + i, S, B, n, H) for i, n in enumerate((N, groups, groups))]
    out = attention(*inputs, mask, attn_mask_type=mask_type, **kwargs)
    out.backward(draw(9, S, B, N * H).detach())
    return [out.detach(), *(x.grad for x in inputs)]


def both(mask_name, groups):
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from mindspeed.te.pytorch.attention import DotProductAttention as Ours

    assert issubclass(TEDotProductAttention, Ours)
    config = configure(num_query_groups=groups)
    hidden = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    hidden[0, ..., -3:] = True
    mask_type = AttnMaskType[mask_name]
    if mask_name == "causal":
        hidden = torch.ones(1, 1, S, S).triu(1).bool()
    return [
        run(build(kind, config, mask_type), hidden, mask_type, groups)
        for kind in (TEDotProductAttention, DotProductAttention)
    ]


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("mask_name", ["causal", "padding"])
def test_equals_megatrons_own(mask_name, groups):
    ((ours, theirs),) = run_ranks(both, 1, mask_name, groups)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def packed():
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    attention = build(TEDotProductAttention, configure(), AttnMaskType.causal)
    lengths = [3, 5]
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=5,
        max_seqlen_kv=5,
    )
    q, k, v = (draw(i, 8, n, H) for i, n in enumerate((N, 2, 2)))
    together = attention(
        q, k, v, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=params
    )
    alone = [
        attention(*(x.unsqueeze(1) for x in document), None, attn_mask_type=AttnMaskType.causal)
        for document in zip(*(x.split(lengths) for x in (q, k, v)))
    ]
    together.square().sum().backward()
    grads = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    alone = torch.cat(alone).squeeze(1)
    alone.square().sum().backward()
    return [together.detach(), *grads], [alone.detach(), *(x.grad for x in (q, k, v))]


def test_packed_documents_equal_documents_alone():
    ((together, alone),) = run_ranks(packed, 1)
    for got, want in zip(together, alone, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def dropped(sequence_parallel):
    """Return twice dropped ones (every head sees the same values) of this rank."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.enums import AttnMaskType

    config = configure(
        2, attention_dropout=0.5, num_query_groups=4, sequence_parallel=sequence_parallel
    )
    attention = build(TEDotProductAttention, config, AttnMaskType.causal)
    ones = torch.ones(S, B, N // 2, H)
    outputs = []
    torch.manual_seed(3)  # the same on both ranks
    for _ in range(2):
        if sequence_parallel:  # as Megatron's transformer block does
            with get_cuda_rng_tracker().fork():
                outputs.append(attention(ones, ones, ones, None, AttnMaskType.causal))
        else:
            outputs.append(attention(ones, ones, ones, None, AttnMaskType.causal))
    return outputs


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_drop_different_elements(sequence_parallel):
    (first, second), (other, _) = run_ranks(dropped, 2, sequence_parallel)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def fused_rope(interleaved):
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    angle = draw(1, S, 1, 1, H // 2).detach()
    freqs = angle.repeat_interleave(2, -1) if interleaved else torch.cat([angle] * 2, -1)
    bounds = torch.tensor([0, 3, S], dtype=torch.int32)
    results = []
    for fused in (True, False):
        config = configure(apply_rope_fusion=fused, rotary_interleaved=interleaved)
        batched, packed = draw(0, S, B, N, H), draw(2, S, N, H)
        outputs = [apply_rotary_pos_emb(batched, freqs, config)]
        if not interleaved:
            # As long as the longest document, or Megatron counts on through all documents.
            outputs.append(apply_rotary_pos_emb(packed, freqs[:5], config, cu_seqlens=bounds))
        sum(out.square().sum() + out[0].sum() for out in outputs).backward()
        results.append([*outputs, batched.grad, *([] if interleaved else [packed.grad])])
    return results


@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_rotary_embedding_equals_megatrons_own(interleaved):
    ((fused, plain),) = run_ranks(fused_rope, 1, interleaved)
    for got, want in zip(fused, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
