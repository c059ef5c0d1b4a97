"""Save and load a training through Megatron's distributed checkpoint (torch_dist)."""

from typing import Any

from megatron.core import dist_checkpointing
from packaging.version import Version

from mindspeed.compat import megatron
from tests.gpt.training import Training


def save(training: Training, folder: str) -> None:
    """Write weights and optimizer state in a form that knows no layout."""
    dist_checkpointing.save(_state(training, is_loading=False), folder, ("torch_dist", 1))


def load(training: Training, folder: str) -> None:
    """Read this rank's part of them."""
    state = dist_checkpointing.load(_state(training, is_loading=True), folder)
    for index, chunk in enumerate(training.chunks):
        chunk.load_state_dict(state[f"model{index}"])
    training.optimizer.load_state_dict(state["optimizer"])


def _state(training: Training, *, is_loading: bool) -> dict[str, Any]:
    models = {
        f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(training.chunks)
    }
    # Newer releases have to be asked for optimizer state that another layout can read.
    newer = megatron.version() >= Version("0.15")
    form = {"metadata": {"distrib_optim_sharding_type": "fully_reshardable"}} if newer else {}
    optimizer = training.optimizer.sharded_state_dict(models, is_loading, **form)
    return models | {"optimizer": optimizer}
