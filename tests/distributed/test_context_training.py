"""Training with split sequences gives the losses of one rank, at every megatron-core version."""

import pytest

from tests.budget import examples
from tests.distributed.context_model import train
from tests.ranks import run_ranks

STEPS = 4 if examples(1) < 100 else 20
# (ranks, sizes): each algorithm, alone and with tensor and pipeline parallelism, packed and not.
CASES = {
    "cp2": (2, {"cp": 2}),
    "cp2 packed": (2, {"cp": 2, "packed": True}),
    "cp2 a2a": (2, {"cp": 2, "comm_type": "a2a", "packed": True}),
    "cp2 all_gather": (2, {"cp": 2, "comm_type": "all_gather"}),
    "cp4 a2a, fewer key heads": (4, {"cp": 4, "comm_type": "a2a"}),
    "cp4 a2a+p2p packed": (4, {"cp": 4, "comm_type": "a2a+p2p", "packed": True}),
    "cp2 tp2 packed": (4, {"cp": 2, "tp": 2, "packed": True}),
    "cp2 pp2": (4, {"cp": 2, "pp": 2, "comm_type": "a2a"}),
    "local, cp2": (2, {"spec": "local", "cp": 2}),
    "local, cp4 a2a+p2p packed": (
        4,
        {"spec": "local", "cp": 4, "comm_type": "a2a+p2p", "packed": True},
    ),
    "cp2 pp2 packed": (4, {"cp": 2, "pp": 2, "packed": True}),
}


@pytest.fixture(scope="module")
def one_rank():
    return {
        packed: run_ranks(train, 1, "te", 1, 1, 1, "p2p", packed, STEPS)[0]
        for packed in (False, True)
    }


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_one_rank(name, one_rank):
    ranks, options = CASES[name]
    sizes = {"spec": "te", "tp": 1, "pp": 1, "comm_type": "p2p", "packed": False} | options
    found = run_ranks(
        train,
        ranks,
        *(sizes[key] for key in ("spec", "cp", "tp", "pp", "comm_type", "packed")),
        STEPS,
    )
    want = one_rank[sizes["packed"]]
    for losses in found:
        if losses[0] is not None:  # of a last stage
            assert losses == pytest.approx(want, rel=1e-6, abs=0)
    assert len(set(want)) == STEPS
