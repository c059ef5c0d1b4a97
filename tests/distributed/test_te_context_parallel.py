"""DotProductAttention on split sequences: every layout and mask, groups that change, documents."""

import pytest
import torch
import torch.distributed as dist

from mindspeed.parallel.context.layout import Layout
from mindspeed.te.pytorch import DotProductAttention
from mindspeed.te.torch_extension import thd_get_partitioned_indices
from tests.ranks import run_ranks

S, B, N, K, H = 12, 2, 4, 2, 8
BOUNDS, PADDED = [0, 5, 6, 12], [0, 8, 12, 20]


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def batch(layout):
    """Return q, k, v of a whole batch."""
    shapes = [(S, B, heads, H) for heads in (N, K, K)]
    tensors = [draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    return [x.transpose(0, 1) if layout == "bshd" else x for x in tensors]


def documents_mask():
    """Return a mask (True = hidden) of two documents, causal inside each."""
    number = torch.arange(S) >= 7
    seen = (number == number.unsqueeze(1)) & torch.ones(S, S, dtype=torch.bool).tril()
    return ~seen.expand(B, 1, S, S)


CASES = {
    "sbhd": {},
    "bshd, a2a": {"layout": "bshd", "comm_type": "a2a"},
    "window": {"window_size": (3, 0)},
    "full, gathered": {"attn_mask_type": "no_mask", "comm_type": "all_gather"},
    "bias": {"bias": "post_scale_bias"},
    "bias, a2a": {"bias": "pre_scale_bias", "comm_type": "a2a"},
    "alibi": {"slopes": True},
    "mask": {"mask": True},
    "mask, a2a": {"mask": True, "comm_type": "a2a"},
    "recompute": {"recompute": True},
}


def attend(case, group):
    """Return the output, gradients and largest scores of one case, whole or on this rank."""
    options = dict(CASES[case])
    layout = options.pop("layout", "sbhd")
    names = ("attn_mask_type", "window_size")
    module = DotProductAttention(
        N,
        H,
        num_gqa_groups=K,
        qkv_format=layout,
        cp_group=group,
        cp_comm_type=options.get("comm_type", "p2p"),
        return_max_logit=True,
        **{name: options[name] for name in names if name in options},
    )
    module.reads_mask = "mask" in options
    dim, split = (1 if layout == "bshd" else 0), Layout.zigzag(S, 1 if group is None else 2)
    rank = 0 if group is None else group.rank()
    inputs = [split.shard(x, rank, dim).requires_grad_() for x in batch(layout)]
    call = {}
    if "bias" in options:
        bias = split.shard(draw(1, N, S, S, seed=9), rank, 2).requires_grad_()
        inputs.append(bias)
        call = {"core_attention_bias_type": options["bias"], "core_attention_bias": bias}
    if "slopes" in options:
        call = {"core_attention_bias_type": "alibi", "alibi_slopes": draw(N, seed=8).abs()}
    if "mask" in options:
        call = {"attention_mask": split.shard(documents_mask(), rank, 2)}
    out, largest = module(
        *inputs[:3], checkpoint_core_attention=options.get("recompute", False), **call
    )
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in inputs)], largest, dim


def split_batches():
    return {case: attend(case, dist.group.WORLD)[:2] for case in CASES}


def test_batches_equal_one_rank():
    found = run_ranks(split_batches, 2)
    for case in CASES:
        whole, largest, dim = attend(case, None)
        for rank, results in enumerate(found):
            parts, got_largest = results[case]
            torch.testing.assert_close(got_largest.double(), largest.double(), rtol=1e-6, atol=1e-6)
            for number, (part, want) in enumerate(zip(parts, whole, strict=True)):
                along = 2 if number == 4 else dim  # rows of a bias come third
                want = Layout.zigzag(S, 2).shard(want, rank, along)
                torch.testing.assert_close(part, want, rtol=1e-12, atol=1e-12, msg=case)


def packed(size, rank, changed=None):
    """Return this rank's q, k, v of packed documents with NaN in the padding."""
    tensors = [draw(PADDED[-1], heads, H, seed=heads + i) for i, heads in enumerate((N, K, K))]
    for x in tensors:
        for start, length in zip(PADDED, (5, 1, 6)):
            if changed == start:
                x[start : start + length] += 1.0
        x[5:8], x[9:12], x[18:] = (float("nan"),) * 3
    index = thd_get_partitioned_indices(torch.tensor(PADDED), PADDED[-1], size, rank)
    return [x.index_select(0, index).requires_grad_() for x in tensors], index


def attend_packed(module, inputs):
    real, padded = torch.tensor(BOUNDS), torch.tensor(PADDED)
    return module(
        *inputs,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
    )


def dynamic_groups():
    """Attend in a group of two, alone, and in the group again, as micro-batches may ask for it."""
    module, group = DotProductAttention(N, H, num_gqa_groups=K), dist.group.WORLD
    results = []
    for cp_group in (group, None, group):
        ranks = None if cp_group is None else [0, 1]
        module.set_context_parallel_group(cp_group, ranks, None, "a2a" if results else "p2p")
        size, rank = (1, 0) if cp_group is None else (2, dist.get_rank())
        inputs, index = packed(size, rank)
        out = attend_packed(module, inputs)
        grads = torch.autograd.grad(out.square().sum(), inputs)
        results.append((index, [out.detach(), *grads]))
    return results


def test_groups_may_change_at_run_time():
    inputs, _ = packed(1, 0)
    out = attend_packed(DotProductAttention(N, H, num_gqa_groups=K), inputs)
    whole = [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]
    for results in run_ranks(dynamic_groups, 2):
        for index, parts in results:
            for part, want in zip(parts, whole):
                assert not part.isnan().any()
                torch.testing.assert_close(part, want[index], rtol=1e-12, atol=1e-12)


def other_document(comm_type):
    """Return the outputs of this rank, before and after a change of the last document, twice."""
    module = DotProductAttention(
        N, H, num_gqa_groups=K, cp_group=dist.group.WORLD, cp_comm_type=comm_type
    )
    outputs = []
    for changed in (None, PADDED[2], PADDED[2]):
        inputs, index = packed(2, dist.get_rank(), changed)
        outputs.append(attend_packed(module, inputs).detach())
    return index, outputs


@pytest.mark.parametrize("comm_type", ["p2p", "a2a", "all_gather"])
def test_a_document_does_not_touch_the_others(comm_type):
    for index, (before, after, again) in run_ranks(other_document, 2, comm_type):
        others = index < PADDED[2]
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[~others], after[~others])
        assert torch.equal(after, again)
