"""The distributed optimizer: the same weights from optimizer state that is split over ranks."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.gpt.buckets import BucketEvents
from tests.gpt.layout import Layout
from tests.gpt.runs import assert_same_training, assert_same_weights, in_ranks, trained

if TYPE_CHECKING:
    from tests.gpt.training import Training

_BYTES_PER_PARAMETER = 12  # in bf16 training: fp32 weight, first and second moment
_MOMENTS = ("exp_avg", "exp_avg_sq")
_ALIGNMENT = 64  # elements: where a parameter may begin; the buffer ends at twice that


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, distributed_optimizer=True),
        Layout(dp=4, distributed_optimizer=True),
        Layout("llama", dp=2, distributed_optimizer=True, spec="te"),
    ],
    ids=str,
)
def test_split_state_trains_like_the_whole(layout: Layout) -> None:
    assert_same_training(layout)


def test_split_and_replicated_state_give_the_same_bits() -> None:
    replicated = trained(Layout(dp=2))
    split = trained(Layout(dp=2, distributed_optimizer=True))
    assert split.losses == replicated.losses
    assert split.fingerprints == replicated.fingerprints
    assert_same_weights(split.weights, replicated.weights)


@pytest.mark.parametrize("spec", ["local", "te"])
def test_a_rank_keeps_its_part_of_the_state(spec: str) -> None:
    replicated = in_ranks(Layout(bf16=True, spec=spec), _measure)
    split = in_ranks(Layout(bf16=True, dp=2, distributed_optimizer=True, spec=spec), _measure)
    [(state, parameters, tensors)] = replicated
    assert state == _BYTES_PER_PARAMETER * parameters
    assert sum(part for part, *_ in split) == state
    padding = _BYTES_PER_PARAMETER * _ALIGNMENT * (tensors + 2)
    for part, *_ in split:
        assert abs(part - state / 2) <= padding / 2


def test_gradients_are_scattered_once_and_weights_gathered_once() -> None:
    for log in in_ranks(Layout(dp=2, distributed_optimizer=True), _collectives):
        assert log == [("blocking reduce", 0), ("blocking gather", 0)]


def _measure(training: "Training") -> tuple[int, int, int]:
    """Return the bytes of optimizer state, and the model's numbers of parameters and tensors."""
    training.step()
    parameters = list(training.chunks[0].parameters())
    return (
        sum(_state_bytes(part) for part in _parts(training.optimizer)),
        sum(parameter.numel() for parameter in parameters),
        len(parameters),
    )


def _parts(optimizer: Any) -> list[Any]:
    """Return the optimizers of torch's kind inside a Megatron optimizer."""
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


def _state_bytes(optimizer: Any) -> int:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments = [optimizer.state[weight][key] for weight in weights for key in _MOMENTS]
    return sum(tensor.numel() * tensor.element_size() for tensor in [*weights, *moments])


def _collectives(training: "Training") -> list[tuple[str, int]]:
    training.step()
    events = BucketEvents(training)
    training.step()
    return events.log
