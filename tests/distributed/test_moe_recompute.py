"""Load-aware recompute of experts: the same loss, fewer saved bytes, one decision on all ranks."""

from dataclasses import replace

import torch
import torch.distributed as dist

from tests.budget import examples
from tests.distributed.moe_case import EXPERTS, TOKENS, Case, build, tokens
from tests.ranks import run_ranks

RANKS = 4
SCALE = 1.5


def passes(case):
    """Run three passes of a skewed router; return of each output, gradients and saved bytes."""
    from tests.gpt.saved import SavedTensors

    layer = build(case, torch.float32)
    layer.router.weight.data[2] = 5.0  # with positive tokens, the first choice of all
    found = []
    for step in range(3):
        x = tokens(RANKS, torch.float32, step)[0][dist.get_rank()].abs().unsqueeze(1)
        x.requires_grad_()
        layer.zero_grad()
        with SavedTensors(layer.parameters()) as saved:
            out = layer(x)[0]
            kept = sum(each.bytes for each in saved.kept() if each.dtype.is_floating_point)
        out.sum().backward()
        grads = [parameter.grad.clone() for parameter in layer.parameters()]
        found.append((out.detach(), [x.grad, *grads], kept))
    return found


def skewed_and_balanced():
    for dispatcher in ("allgather", "alltoall"):
        plain = Case(ep=4, dispatcher=dispatcher, shared=True)
        ours, base = passes(replace(plain, recompute_scale=SCALE)), passes(plain)
        for (out, grads, kept), (want, expected, before) in zip(ours, base, strict=True):
            assert torch.equal(out, want)
            assert all(map(torch.equal, grads, expected))
            assert kept < before / 3, (kept, before)
    # Every expert gets every token: recomputed in the first pass only.
    plain = Case(ep=2, tp=2, topk=EXPERTS)
    ours, base = passes(replace(plain, recompute_scale=SCALE)), passes(plain)
    for (out, grads, _), (want, expected, _) in zip(ours, base, strict=True):
        assert torch.equal(out, want)
        assert all(map(torch.equal, grads, expected))
    assert ours[0][2] < base[0][2] / 3
    assert [kept for _, _, kept in ours[1:]] == [kept for _, _, kept in base[1:]]
    return ours[0][2], base[0][2]


def decisions(num_examples):
    """Fuzz the counts of each rank; return what this rank decided and all counts together."""
    from mindspeed.moe.adaptive_recompute import AdaptiveRecompute

    generator = torch.Generator().manual_seed(dist.get_rank())
    group = dist.distributed_c10d._get_default_group()
    found = []
    for number in range(num_examples):
        decision = AdaptiveRecompute(1.0 + number / num_examples, group)
        first = decision.is_uneven()
        mask = torch.rand(TOKENS, EXPERTS, generator=generator) < 0.5
        with decision.recording():
            decision.record(mask, 2)
        decision.record(~mask, 2)  # the repetition in backward does not count
        found.append((first, decision.is_uneven(), mask.sum(0)))
    return found


def both(num_examples):
    return decisions(num_examples), skewed_and_balanced()


def test_recompute_follows_the_load_alike_on_all_ranks():
    count = examples(4)
    ranks = run_ranks(both, RANKS, count)
    for number, of_ranks in enumerate(zip(*(fuzzed for fuzzed, _ in ranks), strict=True)):
        total = sum(counts for _, _, counts in of_ranks)
        pairs = RANKS * TOKENS * 2
        want = bool(total.max() > pairs / EXPERTS * (1.0 + number / count))
        assert {decided for _, decided, _ in of_ranks} == {want}
        assert all(first for first, _, _ in of_ranks)
