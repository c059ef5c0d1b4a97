"""Optimization levels: each switches on more, and none changes the training."""

import pytest

from tests.gpt.layout import Layout
from tests.gpt.runs import STEPS, trained
from tests.ranks import run_ranks

_OPTIONS = {"use_fused_swiglu": True, "use_fused_rmsnorm": True}
_FUSED = {"fused_swiglu", "fused_rmsnorm"}


@pytest.mark.parametrize(
    "layout", [Layout("llama", tp=2, sequence_parallel=True), Layout("llama", spec="te")], ids=str
)
@pytest.mark.parametrize(("level", "fused"), [(0, set()), (1, _FUSED), (2, _FUSED)])
def test_every_level_trains_alike(level: int, fused: set[str], layout: Layout) -> None:
    expected = trained(layout.plain())
    for on, losses, norms in run_ranks(_train, layout.world, level, layout):
        assert on & _FUSED == fused
        assert losses == pytest.approx(expected.losses, rel=1e-6)
        assert norms == pytest.approx(expected.grad_norms, rel=1e-5)


def _train(level: int, layout: Layout) -> tuple[set[str], list[float | None], list[float]]:
    """Return which features were on, the losses and the norms of the gradients."""
    import mindspeed
    from tests.gpt.training import Training

    mindspeed.enable(optimization_level=level, **_OPTIONS)
    training = Training(layout)
    losses, norms = zip(*(training.step() for _ in range(STEPS)))
    return set(mindspeed.report().on), list(losses), list(norms)
