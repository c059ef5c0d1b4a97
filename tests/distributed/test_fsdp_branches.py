"""Ranks that run different branches of a model train it like one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mindspeed.config import build
from mindspeed.fsdp import FsdpOptions, shard
from tests.budget import examples
from tests.distributed.branching_model import EXPERTS, WIDTH, Case, new_model, train
from tests.ranks import RankFailed, run_ranks

WORLD, EXAMPLES = 2, examples(0.5)
EVERY = ["image", "audio", "video", "layers.{*}", "experts.{*}"]
NESTED = ["image", "image.{0,2}", "audio", "audio.{0,2}", "video", "layers.{*}", "experts.{*}"]

recipes = st.tuples(
    st.lists(st.sampled_from(["image", "audio", "video"]), max_size=3).map(tuple),
    st.sets(st.integers(0, EXPERTS - 1)).map(sorted).map(tuple),
)


@st.composite
def cases(draw: Any) -> Case:
    wrapped = draw(st.sampled_from([EVERY, NESTED, ["audio", "layers.{*}"], []]))
    options = {
        "sharding_size": draw(st.sampled_from(["auto", "auto", 1])),
        "sub_modules_to_wrap": wrapped,
        "reshard_after_forward": draw(st.booleans()),
        "recompute_modules": draw(
            st.sampled_from([[], ["image", "layers.{*}"], ["audio", "experts.{*}"]])
        ),
        "use_reentrant": draw(st.booleans()),
        "num_to_forward_prefetch": draw(st.integers(0, 2)),
        "num_to_backward_prefetch": draw(st.integers(0, 2)),
    }
    micro_batches = draw(st.integers(1, 2))
    ranks = st.tuples(*[recipes] * WORLD)
    step = st.tuples(*[ranks] * micro_batches)
    return Case(options, tuple(draw(st.tuples(*[step] * 4))), draw(st.booleans()))


def difference(case: Case) -> str:
    """Return how this rank differs from one process, empty if it does not."""
    ours, single = (train(case, dist.get_rank(), is_sharded) for is_sharded in (True, False))
    if ours.losses != pytest.approx(single.losses, rel=1e-12, abs=1e-12):
        return f"losses {ours.losses} against {single.losses}"
    if ours.with_gradients != single.with_gradients or ours.with_state != single.with_state:
        return f"gradients {ours.with_gradients} against {single.with_gradients}"
    for name, weight in ours.weights.items():
        if not torch.allclose(weight, single.weights[name], rtol=1e-10, atol=1e-12):
            return f"{name} differs"
    return ""


def search(examples: int) -> int:
    """Search for a case that differs; all ranks draw the same cases and judge together."""
    tried = 0

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def run(case: Case) -> None:
        nonlocal tried
        tried += 1
        found = difference(case)
        bad = torch.tensor([bool(found)], dtype=torch.int)
        dist.all_reduce(bad)
        assert not bad.item(), f"{case}: {found}"

    run()
    return tried


def test_any_rank_may_run_any_branch():
    assert min(run_ranks(search, WORLD, EXAMPLES, timeout=300)) >= EXAMPLES


IMAGE, AUDIO, VIDEO, TEXT = (("image",), ()), (("audio",), ()), (("video",), ()), ((), ())
STEPS = (
    ((IMAGE, AUDIO, IMAGE, AUDIO), (TEXT, AUDIO, TEXT, (("audio",), (0, 2)))),
    ((TEXT, VIDEO, TEXT, TEXT), ((("video", "image"), (1,)), TEXT, IMAGE, TEXT)),
    ((TEXT, TEXT, TEXT, TEXT), ((("image", "image"), ()), TEXT, IMAGE, (("image",) * 3, ()))),
)
FOUR = {
    "hsdp": {"sharding_size": 2},
    "resharded to two": {"sharding_size": "auto", "reshard_after_forward": 2},
    "offloaded": {"sharding_size": "auto", "offload_to_cpu": True, "num_to_forward_prefetch": 1},
}


def four_ranks() -> dict[str, str]:
    return {
        name: difference(Case({**options, "sub_modules_to_wrap": EVERY}, STEPS, is_reduced_once))
        for is_reduced_once, (name, options) in zip((True, False, True), FOUR.items())
    }


def test_four_ranks_with_other_meshes():
    for found in run_ranks(four_ranks, 4, timeout=300):
        assert found == dict.fromkeys(FOUR, "")


def unequal_calls() -> None:
    model = new_model()
    shard(model, build(FsdpOptions, {"sharding_size": "auto"}))
    x = torch.ones(1, WIDTH, dtype=torch.double)
    loss = model(x, TEXT).sum()
    if dist.get_rank():
        loss.backward()
    else:
        model(x, TEXT)


def test_unequal_numbers_of_calls_raise():
    with pytest.raises(RankFailed, match="a rank is in a forward pass and another in a backward"):
        run_ranks(unequal_calls, WORLD)
