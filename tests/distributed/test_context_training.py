"""Training with split sequences gives the losses of one rank, at every megatron-core version."""

from itertools import product

import pytest
import torch

from tests.budget import examples
from tests.distributed.context_model import DOCUMENTS, logits, mtp_losses, train
from tests.ranks import run_ranks

DEEP = examples(1) > 100
STEPS = 20 if DEEP else 4
# By ranks: each algorithm, alone and with tensor and pipeline parallelism, packed and not.
# Double rings and local specs come last: the features that they need stay on.
CASES = {
    2: [
        {"cp": 2},
        {"cp": 2, "packed": True},
        {"cp": 2, "comm_type": "a2a", "packed": True},
        {"cp": 2, "comm_type": "all_gather"},
        {"cp": 2, "comm_type": ["a2a", "all_gather"], "packed": True},  # of each layer
        {"spec": "local", "cp": 2},
    ],
    4: [
        {"cp": 4, "comm_type": "a2a"},  # fewer key heads than ranks
        {"cp": 4, "comm_type": "a2a+p2p", "packed": True},
        {"cp": 2, "tp": 2, "packed": True},
        {"cp": 2, "pp": 2, "comm_type": "a2a"},
        {"cp": 2, "pp": 2, "packed": True},
        {"cp": 4, "window": 2, "packed": True},
        {"spec": "local", "cp": 4, "comm_type": "a2a+p2p", "packed": True},
    ],
}
if DEEP:
    for sizes, packed in product(
        ({"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2}, {"cp": 2, "tp": 2, "pp": 2}),
        (False, True),
    ):
        ranks = sizes["cp"] * sizes.get("tp", 1) * sizes.get("pp", 1)
        hybrid = ["a2a+p2p"] if sizes["cp"] == 4 else []
        cases = [
            {**sizes, "comm_type": comm_type, "packed": packed}
            for comm_type in ("p2p", "a2a", "all_gather", *hybrid)
        ]
        CASES[ranks] = [*cases, *CASES.get(ranks, [])]


def train_each(cases, steps):
    """Return the losses of each case, and of the first packed one once more."""
    first = next(case for case in cases if case.get("packed"))
    return [train(**case, steps=steps) for case in [first, *cases]]


@pytest.fixture(scope="module")
def one_rank():
    cases = [{"cp": 1, "packed": packed} for packed in (True, False)]
    return dict(zip((True, False), run_ranks(train_each, 1, cases, STEPS)[0][1:]))


@pytest.mark.parametrize("ranks", CASES)
def test_losses_equal_one_rank_and_repeat(ranks, one_rank):
    cases = CASES[ranks]
    first = cases.index(next(case for case in cases if case.get("packed")))
    worst = 0.0
    for again, *found in run_ranks(train_each, ranks, cases, STEPS, timeout=600):
        assert again == found[first]  # to the last bit
        for case, losses in zip(cases, found, strict=True):
            want = one_rank[case.get("packed", False)]
            if losses[0] is not None:  # of a last stage
                assert losses == pytest.approx(want, rel=1e-6, abs=0), case
                worst = max(worst, *(abs(a - b) / b for a, b in zip(losses, want)))
            assert len(set(want)) == STEPS
    print(f"{ranks} ranks, {len(cases)} cases, {STEPS} steps: losses within {worst:.1e}")


ALGORITHMS = {2: [("p2p", 1), ("a2a", 1), ("all_gather", 1)], 4: [("a2a+p2p", 1), ("p2p", 2)]}
"""(cp_comm_type, window) by the number of ranks."""


def logits_of_each(algorithms, cp):
    """Return each algorithm's logits before and after another document is changed."""
    return [
        logits(cp, comm_type, changed, window)
        for comm_type, window in algorithms
        for changed in (None, 3)
    ]


@pytest.mark.parametrize("ranks", ALGORITHMS)
def test_a_document_leaves_the_logits_of_the_others(ranks):
    found = run_ranks(logits_of_each, ranks, ALGORITHMS[ranks], ranks)
    for results in found:
        for before, after in zip(results[::2], results[1::2], strict=True):
            for document in range(len(DOCUMENTS)):
                assert torch.equal(before[document], after[document]) == (document != 3)


def mtp_losses_of_each(cases):
    return [mtp_losses(**case) for case in cases]


def test_multi_token_prediction_equals_one_rank():
    """The tokens one step on, and labels that the loss is divided by, are on other ranks, too."""
    cases = [{"cp": 4}, {"cp": 2, "tp": 2}]
    (((_, whole, further, gradient),),) = run_ranks(mtp_losses_of_each, 1, [{"cp": 1}])
    assert gradient.abs().max() > 1e-3
    for case, ranks in zip(cases, zip(*run_ranks(mtp_losses_of_each, 4, cases)), strict=True):
        found = torch.full_like(whole, float("nan"))
        for rows, losses, *_ in ranks:
            found[:, rows] = losses
        worst = float(((found - whole) / whole).abs().max())
        got = sum(one for _, _, one, _ in ranks) / len(ranks)  # the mean is what is logged
        print(f"{case}: tokens within {worst:.1e}, one step on {abs(got / further - 1):.1e}")
        assert worst < 1e-5 and got == pytest.approx(further, rel=1e-6)
        parts = [part for *_, part in ranks[: case.get("tp", 1)]]
        torch.testing.assert_close(torch.cat(parts), gradient, rtol=1e-4, atol=1e-6)
