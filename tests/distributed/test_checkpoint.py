"""Distributed checkpoints: what one layout saved, another goes on from as if nothing had been."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.gpt.layout import Layout
from tests.gpt.runs import in_ranks, trained

if TYPE_CHECKING:
    from tests.gpt.training import Training

_BEFORE, _AFTER = 3, 2

_PLAIN = Layout()
_TP = Layout(tp=2)
_PP = Layout(pp=2)
_TE = Layout(spec="te")
_TE_TP = Layout(tp=2, sequence_parallel=True, spec="te")
_LLAMA_VPP = Layout("llama", pp=2, layers_per_virtual_stage=1)
_LLAMA_TE_TP = Layout("llama", tp=2, spec="te")
_SPLIT_STATE = Layout(dp=2, distributed_optimizer=True)
_PADDED_BUCKETS = Layout(
    dp=2, distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=1000
)
_SPLIT_STATE_TP = Layout(tp=2, distributed_optimizer=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> "_Saved":
    return _Saved(tmp_path_factory)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (_TP, _PLAIN),
        (_TP, _PP),
        (_PLAIN, _TP),
        (_PP, _TP),
        (_PLAIN, _TE),
        (_TE, _PLAIN),
        (_TP, _TE_TP),
        (_LLAMA_VPP, _LLAMA_TE_TP),
        (_SPLIT_STATE, _SPLIT_STATE_TP),
        (_SPLIT_STATE_TP, _SPLIT_STATE),
        (_PADDED_BUCKETS, _PADDED_BUCKETS),
        (_PADDED_BUCKETS, _SPLIT_STATE_TP),
    ],
    ids=str,
)
def test_training_goes_on_in_another_layout(
    saved: "_Saved", source: Layout, target: Layout
) -> None:
    """The moments of Adam come along too, or the second loss would differ."""
    expected = trained(target.plain())
    ranks = in_ranks(target, _resume, saved.folder(source))
    losses = [rank_losses for rank_losses, _ in ranks if None not in rank_losses]
    for step, mean in enumerate(sum(step) / len(step) for step in zip(*losses)):
        assert mean == pytest.approx(expected.losses[_BEFORE + step], rel=1e-6)
    for _, norms in ranks:
        assert norms == pytest.approx(expected.grad_norms[_BEFORE : _BEFORE + _AFTER], rel=1e-5)


class _Saved:
    """Checkpoints of this session, one a layout."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._folders: dict[Layout, Path] = {}

    def folder(self, layout: Layout) -> str:
        if layout not in self._folders:
            self._folders[layout] = self._factory.mktemp("checkpoint")
            in_ranks(layout, _save, str(self._folders[layout]))
        return str(self._folders[layout])


def _save(training: "Training", folder: str) -> None:
    from tests.gpt import checkpoint

    for _ in range(_BEFORE):
        training.step()
    checkpoint.save(training, folder)


def _resume(training: "Training", folder: str) -> tuple[list[float | None], list[float]]:
    from tests.gpt import checkpoint

    checkpoint.load(training, folder)
    losses, norms = zip(*(training.step() for _ in range(_AFTER)))
    return list(losses), list(norms)
