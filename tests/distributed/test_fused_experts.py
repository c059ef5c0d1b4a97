"""Experts as one path: every layout equals a loop over the experts, with less kept."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from tests.distributed.moe_case import EXPERTS, FFN, HIDDEN, TOKENS, Case, build, tokens
from tests.distributed.test_moe_dispatch import LAYOUTS, RANKS, Fixed, equals_the_loop, routing
from tests.ranks import run_ranks

ONE = Case(one_path=True)
KINDS = ("random", "one expert", "empty experts", "by rank")
CASES = [(ONE, kind) for kind in KINDS]
CASES += [(replace(ONE, **layout), "random") for layout in LAYOUTS.values()]
CASES += [
    (replace(ONE, topk=EXPERTS), "random"),
    (replace(ONE, topk=1, dispatcher="allgather"), "by rank"),
    (replace(ONE, shared=True), "random"),
    (replace(ONE, shared=True, overlap=True), "random"),
    (replace(ONE, is_async=False), "random"),
    (replace(ONE, recompute_scale=0.1), "random"),
    (replace(ONE, ep=4, is_async=False), "one expert"),
    (replace(ONE, ep=2, dispatcher="allgather"), "empty experts"),
    (replace(ONE, tp=2, shared=True, overlap=True), "random"),
    (replace(ONE, ep=4, capacity=0.5), "random"),
    (replace(ONE, ep=4, capacity=1.5, pad=True), "random"),
]


def counted(cases):
    """Run the cases; return how often the path ran in each."""
    from mindspeed.te import fused_experts

    plain, calls = fused_experts.expert_mlp, []
    fused_experts.expert_mlp = lambda *args: calls.append(1) or plain(*args)
    found = []
    for case, kind in cases:
        calls.clear()
        equals_the_loop(case, kind, 3)
        found.append(len(calls))
    fused_experts.expert_mlp = plain
    return found, others()


@contextmanager
def permute_of_0_19():
    """Let permute be that of Megatron 0.19: as many rows as it is asked for, and five values."""
    from mindspeed.moe import alltoall_dispatcher

    plain = alltoall_dispatcher.permute

    def permute(tokens, routing_map, *, num_out_tokens, **kwargs):
        assert num_out_tokens == routing_map.sum()
        values = plain(tokens, routing_map, num_out_tokens=num_out_tokens, **kwargs)
        return *values[:3], None, None

    alltoall_dispatcher.permute = permute
    yield
    alltoall_dispatcher.permute = plain


def others():
    """Return the bytes that a layer keeps with and without the path, and what hooks change."""
    from megatron.core.transformer import TransformerConfig

    from tests.gpt.saved import SavedTensors

    probs, mask = (each[dist.get_rank()] for each in routing("random", 2, 1))
    router = Fixed(probs.requires_grad_(), mask)
    found, calls = {}, []
    for name, case in (("one path", ONE), ("apart", replace(ONE, one_path=False))):
        layer = build(case, torch.float64)
        layer.router = router
        x = tokens(RANKS, torch.float64)[0][dist.get_rank()].unsqueeze(1).clone()
        x.requires_grad_()
        with SavedTensors(layer.experts.parameters()) as saved:
            out = layer(x)[0]
            kept = sum(each.bytes for each in saved.kept() if each.dtype.is_floating_point)
        found[name] = (type(layer.token_dispatcher).__name__, kept, out.detach())
        if case is ONE:
            layer.experts.linear_fc1.register_forward_pre_hook(lambda *_: calls.append(1))
            layer.experts.linear_fc2.register_forward_pre_hook(
                lambda _, args: (2 * args[0], args[1])
            )
            found["hook"] = layer(x)[0].detach(), len(calls)
            layer = build(case, torch.float64)
            layer.router = router
            layer.experts.linear_fc1.register_forward_hook(lambda _, args, out: None)
            found["observed"] = layer(x)[0].detach()
    layer = build(ONE, torch.float64)
    # As Megatron's inference does before it decodes: each expert gets all tokens, most for nothing.
    layer.config.moe_expert_capacity_factor = EXPERTS / 2
    layer.config.moe_pad_expert_input_to_capacity = True
    layer.router = Fixed(probs, torch.ones_like(mask))
    found["padded"] = layer(x)[0].detach()
    if "moe_enable_routing_replay" in TransformerConfig.__dataclass_fields__:
        replayed = mask.clone()
        replayed[0] = torch.arange(EXPERTS) == 1  # named twice
        apart = replace(ONE, one_path=False)
        for name, case in (("replay", ONE), ("replay apart", apart), ("replay 0.19", apart)):
            layer = build(case, torch.float64, moe_enable_routing_replay=True)
            layer.router = Fixed(probs.detach() * replayed, replayed)
            with permute_of_0_19() if name == "replay 0.19" else nullcontext():
                found[name] = layer(x)[0].detach()
    if "glu_linear_offset" in TransformerConfig.__dataclass_fields__:
        for name, case in (("offset", ONE), ("offset apart", replace(ONE, one_path=False))):
            layer = build(case, torch.float64, glu_linear_offset=1.0)
            layer.router = router
            found[name] = layer(x)[0].detach()
    return found


def test_every_layout_equals_a_loop_over_the_experts():
    (counts, found), *_ = run_ranks(counted, RANKS, CASES, timeout=300)
    for (case, _), count in zip(CASES, counts, strict=True):
        assert count == (2 if case.recompute_scale else 1), case
    (dispatcher, kept, out), (_, before, want) = found["one path"], found["apart"]
    assert dispatcher == "LocalDispatcher"
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["observed"], want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["padded"], want, rtol=1e-12, atol=1e-12)
    doubled, calls = found["hook"]
    torch.testing.assert_close(doubled, 2 * want, rtol=1e-12, atol=1e-12)
    assert calls == 1
    if "replay" in found:
        for name in ("replay", "replay 0.19"):
            torch.testing.assert_close(found[name], found["replay apart"], rtol=1e-12, atol=1e-12)
    if "offset" in found:
        expected = found["offset apart"]
        torch.testing.assert_close(found["offset"], expected, rtol=1e-12, atol=1e-12)
        assert not torch.equal(expected, want)
    rows = 2 * TOKENS
    floor = 8 * (TOKENS * HIDDEN + rows * 2 * FFN)
    assert floor <= kept <= floor + 8 * rows  # a weight of each row
    assert kept < before - 8 * rows * (HIDDEN + FFN) / 2
