"""Expert GEMMs fused with collectives equal local experts, gradients too."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.distributed.same_numbers import shared
from tests.ranks import RankFailed, run_ranks

H, M, C = 8, 6, 4


def expert_groups():
    """Four ranks: tensor ranks are neighbours, expert ranks two apart."""
    rank = dist.get_rank()
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    expert = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return expert[rank % 2], tensor[rank // 2], rank // 2, rank % 2


def in_one_place(tokens, w1, b1, act, w2, b2):
    """Return what the experts read, (E, ep * C, H), their hidden numbers, and their answers."""
    # The places of all expert ranks, side by side.
    flat = tokens.transpose(0, 1).flatten(1, 2)
    hidden = torch.bmm(flat, w1) + b1.unsqueeze(1)
    answers = torch.bmm(act(hidden), w2) + b2.unsqueeze(1)
    return flat, hidden, answers.unflatten(1, (len(tokens), C)).transpose(0, 1)


def experts(shard_type, activation):
    """Run both operators around each other, and compare with experts computed in one place."""
    from mindspeed.ops import npu_alltoall_allgather_bmm, npu_bmm_reducescatter_alltoall

    group_ep, group_tp, ep_rank, tp_rank = expert_groups()
    ep = tp = 2
    num_experts = 4
    # What each expert rank has for all experts; tensor ranks hold parts of it.
    tokens = shared(0, ep, num_experts, C, H).requires_grad_()
    w1 = shared(1, num_experts, H, M).requires_grad_()
    w2 = shared(2, num_experts, M, H).requires_grad_()
    b1, b2 = shared(3, num_experts, M).requires_grad_(), shared(4, num_experts, H).requires_grad_()
    act = {"None": lambda x: x, "Silu": F.silu, "GELU": F.gelu, "Relu": F.relu}[activation]

    def part(x, dim, index):
        return x.chunk(2, dim)[index]

    def own(x):
        return part(x, 0, ep_rank)

    dim = 2 if shard_type == 0 else 1
    x = part(tokens[ep_rank], dim, tp_rank)
    y1, gathered, plain = npu_alltoall_allgather_bmm(
        x,
        part(own(w1), 2, tp_rank),
        group_ep,
        ep,
        group_tp.group_name,
        tp,
        bias=part(own(b1), 1, tp_rank),
        shard_type=shard_type,
        act_type=activation,
        need_allgather_out=True,
        need_activation_feature=True,
    )
    out = npu_bmm_reducescatter_alltoall(
        y1,
        part(own(w2), 1, tp_rank),
        group_ep,
        ep,
        group_tp,
        tp,
        bias=part(own(b2), 1, tp_rank) if shard_type == 0 else own(b2),
        shard_type=shard_type,
    )

    flat, hidden, whole = in_one_place(tokens, w1, b1, act, w2, b2)
    torch.testing.assert_close(gathered, own(flat))
    torch.testing.assert_close(plain, part(own(hidden), 2, tp_rank))
    torch.testing.assert_close(y1, part(own(act(hidden)), 2, tp_rank))
    expected = part(whole[ep_rank], dim, tp_rank)
    torch.testing.assert_close(out, expected)

    # Each rank's gradient is its share of the whole one.
    leaves = [tokens, w1, w2, b1, b2]
    cotangent = shared(7, *whole.shape)
    wanted = torch.autograd.grad((whole * cotangent).sum(), leaves, retain_graph=True)
    mine = torch.autograd.grad((out * part(cotangent[ep_rank], dim, tp_rank)).sum(), leaves)
    total = [grad.clone() for grad in mine]
    for grad in total:
        dist.all_reduce(grad)
    for got, want in zip(total, wanted):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shard_type", [0, 1])
@pytest.mark.parametrize("activation", ["None", "Silu"])
def test_experts_over_two_groups(shard_type, activation):
    run_ranks(experts, 4, shard_type, activation)


def refuse_experts():
    from mindspeed.ops import npu_alltoall_allgather_bmm as run

    x, w = torch.ones(4, C, H), torch.ones(2, H, M)
    run(x, w, None, 3, None, 3)


def test_numbers_that_are_not_those_of_the_groups_are_refused():
    with pytest.raises(RankFailed, match="ep=3 and tp=3, but the groups have 2 and 2 ranks"):
        run_ranks(refuse_experts, 2)
