"""Dispatchers of tokens: every layout equals a loop over the experts on one rank."""

import os

import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.budget import examples
from tests.distributed.moe_case import (
    EXPERTS,
    LR,
    TOKENS,
    Case,
    build,
    kept,
    loop,
    part,
    reduce_gradients,
    tokens,
    weights,
)
from tests.ranks import run_ranks

RANKS = 4
STEPS = 20 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 4
LAYOUTS = {"EP4": {"ep": 4}, "EP2 TP2": {"ep": 2, "tp": 2}}
LAYOUTS["TP-extend-EP"] = {"ep": 2, "tp": 2, "extend": True}
EXACT = {"rtol": 1e-12, "atol": 1e-12}

CASES = [
    Case(**layout, dispatcher=dispatcher)
    for layout in LAYOUTS.values()
    for dispatcher in ("allgather", "alltoall")
]
CASES += [Case(**layout, shared=True, overlap=True) for layout in LAYOUTS.values()]
CASES += [
    Case(ep=2, dispatcher="allgather"),
    Case(ep=2, shared=True),
    Case(tp=2, shared=True, overlap=True),
    Case(ep=4, fused=True),
    Case(ep=2, tp=2, topk=EXPERTS),
    Case(ep=4, topk=1, dispatcher="allgather"),
    Case(ep=2, tp=2, is_async=False),  # the plain Megatron of the others
]
DROPS = [
    Case(ep=ep, tp=tp, capacity=factor, pad=pad)
    for ep, tp in ((4, 1), (2, 2))
    for factor, pad in ((0.5, False), (0.5, True), (1.5, True))
]
FUSED = [Case(ep=2, tp=2, capacity=factor, pad=True, bmm=True) for factor in (0.5, 1.5)]


class Fixed(torch.nn.Module):
    """A router that returns what it was given."""

    def __init__(self, probs, mask):
        super().__init__()
        self.probs, self.mask = probs, mask

    def forward(self, *_):
        return self.probs, self.mask

    def set_layer_number(self, *_):
        pass


def routing(kind, topk, seed):
    """Return weights and mask (R, T, E) of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(RANKS, TOKENS, EXPERTS, generator=generator, dtype=torch.float64)
    if kind == "one expert":
        scores[..., 2] += 1
    elif kind == "empty experts":
        scores[..., :topk] += 1
    elif kind == "by rank":
        scores[torch.arange(RANKS), :, torch.arange(RANKS) % EXPERTS] += 1
    chosen = scores.topk(topk, -1).indices
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    return scores * mask, mask


def expected(case, kind, seed):
    """Run the loop: output (R, T, H) and gradients of tokens, weights, routing weights."""
    x, g = tokens(RANKS, torch.float64)
    probs, mask = routing(kind, case.topk, seed)
    mask = drop(case, probs, mask)
    parts = {name: w.requires_grad_() for name, w in weights(torch.float64).items()}
    x, probs = x.requires_grad_(), (probs * mask).requires_grad_()
    out = loop(x.flatten(0, 1), probs.flatten(0, 1), mask.flatten(0, 1), parts, case.shared)
    (out.view_as(g) * g).sum().backward()
    grads = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in parts.items()}
    return out.detach().view_as(g), x.grad, probs.grad, grads


def drop(case, probs, mask):
    if case.capacity is None:
        return mask
    capacity = -int(-TOKENS * case.topk * case.capacity // EXPERTS)
    return torch.stack([kept(p, m, capacity) for p, m in zip(probs, mask, strict=True)])


def padded(case, mask):
    """Return the mask with unused tokens up to the capacity, as Megatron's router pads it."""
    if not case.pad:
        return mask
    capacity = min(-int(-TOKENS * case.topk * case.capacity // EXPERTS), TOKENS)
    order = mask.to(torch.int8).argsort(dim=0, descending=True, stable=True)[:capacity]
    return torch.zeros_like(mask).scatter(0, order, True)


def equals_the_loop(case, kind, seed):
    """Run one case on all ranks in float64; empty experts get a gradient of exactly zero."""
    rank = dist.get_rank()
    x, g = (each[rank].unsqueeze(1) for each in tokens(RANKS, torch.float64))
    probs, mask = routing(kind, case.topk, seed)
    mask = drop(case, probs, mask)[rank]
    probs = (probs[rank] * mask).requires_grad_()
    layer = build(case, torch.float64)
    layer.router = Fixed(probs, padded(case, mask))
    x.requires_grad_()
    out = layer(x)[0]
    (out * g).sum().backward()
    reduce_gradients(layer)
    want, dx, dprobs, grads = expected(case, kind, seed)
    where = f"{case}, {kind}, {seed}: {{}}".format
    torch.testing.assert_close(out.squeeze(1).detach(), want[rank], **EXACT, msg=where)
    torch.testing.assert_close(x.grad.squeeze(1), dx[rank], **EXACT, msg=where)
    torch.testing.assert_close(probs.grad * mask, dprobs[rank] * mask, **EXACT, msg=where)
    for name, parameter in layer.named_parameters():
        whole = part(name, grads, layer)
        torch.testing.assert_close(parameter.grad, whole, **EXACT, msg=where)
        if "experts.linear" in name and not name.startswith("shared") and not whole.any():
            assert not parameter.grad.any(), f"{case}: {name} has no token"


def run_cases(cases):
    for case, kind, seed in cases:
        equals_the_loop(case, kind, seed)


def drawn_cases():
    """Draw layouts and routings; the ranks then run all of them in one start."""
    drawn = []
    kinds = st.sampled_from(["random", "one expert", "empty experts", "by rank"])
    seeds = st.integers(0, 2**31)

    @settings(max_examples=examples(0.6), phases=[Phase.generate], database=None)
    @given(st.sampled_from(CASES + DROPS + FUSED), kinds, seeds)
    def draw(case, kind, seed):
        drawn.append((case, kind, seed))

    draw()
    return drawn


def test_every_layout_equals_a_loop_over_the_experts():
    fixed = [(case, "random", 1) for case in CASES + DROPS + FUSED]
    fixed += [
        (Case(**layout, dispatcher=dispatcher), kind, 2)
        for layout in LAYOUTS.values()
        for dispatcher in ("allgather", "alltoall")
        for kind in ("one expert", "empty experts")
    ]
    run_ranks(run_cases, RANKS, fixed + drawn_cases(), timeout=300)


AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}


def train_by_loop(tp, steps):
    """Train the plain layer on the tokens of all ranks; return the loss of each step."""
    parts = {name: w.requires_grad_() for name, w in weights(torch.float32).items()}
    losses = []
    for step in range(steps):
        x, g = tokens(RANKS, torch.float32, seed=step)
        x = x.flatten(0, 1)
        logits = x @ parts["router"].T
        chosen = logits.topk(2, -1)
        probs = torch.zeros_like(logits).scatter(-1, chosen.indices, chosen.values.softmax(-1))
        mask = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen.indices, True)
        loss = ((loop(x, probs, mask, parts, shared=True) - g.flatten(0, 1)) ** 2).mean()
        scores = logits.softmax(-1).view(-1, tp * TOKENS, EXPERTS)  # of each sequence
        load = mask.view_as(scores).sum(1)
        aux = 0.1 * EXPERTS * (scores.sum(1) * load).sum() / (2 * (tp * TOKENS) ** 2)
        grads = torch.autograd.grad(loss + aux, parts.values())
        parts = {
            name: (w - LR * grad).detach().requires_grad_()
            for (name, w), grad in zip(parts.items(), grads, strict=True)
        }
        losses.append(loss.item())
    return losses


def train(case, steps):
    """Train Megatron's layer, its router included; return the loss of each step over all ranks."""
    layer = build(case, torch.float32, **AUX)
    losses = []
    for step in range(steps):
        x, g = (each[dist.get_rank()].unsqueeze(1) for each in tokens(RANKS, torch.float32, step))
        # Squares do not cancel: a signed sum near zero is the same to fewer digits.
        loss = ((layer(x.requires_grad_())[0] - g) ** 2).mean() / RANKS
        layer.zero_grad()
        loss.backward()
        reduce_gradients(layer)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= LR * parameter.grad
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def trainings(cases, steps):
    return [train(case, steps) for case in cases]


def test_every_layout_trains_as_one_rank():
    cases = [
        Case(**layout, dispatcher=dispatcher, shared=True, overlap=dispatcher == "alltoall")
        for layout in LAYOUTS.values()
        for dispatcher in ("allgather", "alltoall")
    ]
    ranks = run_ranks(trainings, RANKS, cases, STEPS)
    for case, losses in zip(cases, ranks[0], strict=True):
        want = torch.tensor(train_by_loop(case.tp, STEPS))
        assert want.isfinite().all()
        torch.testing.assert_close(torch.tensor(losses), want, rtol=1e-6, atol=0, msg=str(case))


class Events(torch.utils._python_dispatch.TorchDispatchMode):
    """What was started, computed and waited for, in order."""

    NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        if not name.startswith("c10d"):
            self.log.append(name)
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self._originals = {name: getattr(dist, name) for name in self.NAMES}
        for name, original in self._originals.items():
            setattr(dist, name, self._logged(name, original))
        return super().__enter__()

    def __exit__(self, *error):
        for name, original in self._originals.items():
            setattr(dist, name, original)
        return super().__exit__(*error)

    def _logged(self, name, original):
        def collective(*args, async_op=False, **kwargs):
            number = sum(entry.startswith(f"start {name}") for entry in self.log)
            self.log.append(f"start {name} {number}")
            work = original(*args, async_op=async_op, **kwargs)
            if not async_op:
                self.log.append(f"end {name} {number}")
                return work
            events = self

            class Logged:
                def wait(self):
                    events.log.append(f"end {name} {number}")
                    return work.wait()

            return Logged()

        return collective

    def during(self, name):
        """Return what happened between the start and the end of a collective."""
        return self.log[self.log.index(f"start {name}") + 1 : self.log.index(f"end {name}")]

    def collectives(self):
        return [entry for entry in self.log if entry.startswith(("start", "end"))]


def log_of(case):
    layer = build(case, torch.float32, **AUX)
    x = tokens(RANKS, torch.float32)[0][dist.get_rank()].unsqueeze(1).requires_grad_()
    with Events() as forward:
        out = layer(x)[0]
    with Events() as backward:
        out.sum().backward()
    return forward, backward


def order_of_collectives():
    gather, scatter, exchange = Events.NAMES
    forward, backward = log_of(Case(ep=4, dispatcher="allgather"))
    starts = [f"start {gather} {n}" for n in range(3)]
    ends = [f"end {gather} {n}" for n in range(3)]
    assert forward.collectives() == [*starts, *ends, f"start {scatter} 0", f"end {scatter} 0"]
    # Rows are numbered while weights and tokens travel, weights picked while tokens do.
    assert "cumsum" in forward.during(f"{gather} 1")
    assert "index_select" in forward.during(f"{gather} 2")
    # Backward: the gradient of the tokens travels first, that of the weights is computed meanwhile.
    assert backward.collectives() == [
        f"start {gather} 0",
        f"end {gather} 0",
        f"start {scatter} 0",
        f"start {scatter} 1",
        f"end {scatter} 0",
        f"end {scatter} 1",
    ]
    assert "index_add" in backward.during(f"{scatter} 0")

    forward, backward = log_of(Case(ep=4, shared=True, overlap=True))
    assert forward.collectives() == [
        f"start {gather} 0",  # counts
        f"end {gather} 0",
        f"start {exchange} 0",  # tokens
        f"start {exchange} 1",  # weights
        f"end {exchange} 0",
        f"end {exchange} 1",
        f"start {exchange} 2",  # outputs
        f"end {exchange} 2",
    ]
    assert "index_select" in forward.during(f"{gather} 0"), "rows are copied beside the counts"
    for number in (0, 2):
        assert "mm" in forward.during(f"{exchange} {number}"), "a half of the shared experts"
        assert "mm" in backward.during(f"{exchange} {2 if number == 0 else 0}")
    assert sum(entry.startswith("start") for entry in backward.log) == 3


def test_collectives_run_beside_the_computation():
    run_ranks(order_of_collectives, RANKS)
