"""Training checkpoints: weights and optimizer in torch_dist, which any layout can load."""

import dataclasses
import inspect
import json
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.dcp_files import check_files
from mindspeed_llm.checkpoint.dcp_metadata import read_metadata
from mindspeed_llm.training.folders import CheckpointFolders, Progress, reason


class Checkpoints:
    """Saves and loads the training of one model."""

    def __init__(self, root: str | None, chunks: list[Any], optimizer: Any) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._folders = CheckpointFolders(root) if root else None
        self._chunks, self._optimizer = chunks, optimizer
        self._calls = AsyncCallsQueue()
        self._saving: int | None = None
        """The iteration that is being saved in the background."""

    def load(self, folder: Path, *, with_optimizer: bool) -> None:
        """Read this rank's part of a training checkpoint of any layout."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from torch.distributed.checkpoint import CheckpointException

        _look_at(folder)
        wanted = self._state(with_optimizer, is_loading=True)
        try:
            state = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
        except (CheckpointException, CheckpointingException) as error:
            raise ConfigError(f"{folder}: cannot be loaded ({reason(error)})") from None
        for name, chunk in self._named():
            chunk.load_state_dict(state[name])
        if with_optimizer:
            self._optimizer.load_state_dict(state["optimizer"])
        else:
            self._optimizer.reload_model_params()

    def save(
        self, progress: Progress, *, keep_last: int | None = None, in_background: bool = False
    ) -> None:
        """Save where the run is, if there is a place for it.

        In the background, what is to be written is copied now, and training may go on; `poll` and
        `finish` see to the end of it.
        """
        from megatron.core import dist_checkpointing

        if self._folders is None:
            return
        self.finish()
        with self._explained(progress.iteration):
            aside = self._folders.new(progress.iteration)
            state = self._state(progress.has_optimizer, is_loading=False)
            request = dist_checkpointing.save(
                state, str(aside), ("torch_dist", 1), async_sharded_save=in_background
            )
            commit = partial(self._folders.commit, aside, progress, keep_last)
            if request is None:
                commit()
            else:
                request.add_finalize_fn(commit)
                self._saving = progress.iteration
                self._calls.schedule_async_request(request)

    def poll(self) -> None:
        """Complete a save in the background if all ranks have written."""
        if self._saving is not None:
            self._finalize(wait=False)

    def finish(self) -> None:
        """Wait for a save in the background and complete it."""
        if self._saving is not None:
            self._finalize(wait=True)

    def _finalize(self, *, wait: bool) -> None:
        assert self._saving is not None
        with self._explained(self._saving):
            self._calls.maybe_finalize_async_calls(blocking=wait)
        if not self._calls.get_num_unfinalized_calls():
            self._saving = None

    def _explained(self, iteration: int) -> AbstractContextManager[None]:
        from megatron.core.dist_checkpointing.core import CheckpointingException

        assert self._folders is not None
        return self._folders.explained(iteration, CheckpointingException)

    def _named(self) -> list[tuple[str, Any]]:
        if len(self._chunks) == 1:
            return [("model", self._chunks[0])]
        return [(f"model{number}", chunk) for number, chunk in enumerate(self._chunks)]

    def _state(self, with_optimizer: bool, *, is_loading: bool) -> dict[str, Any]:
        from megatron.core.optimizer import MegatronOptimizer

        state: dict[str, Any] = {name: chunk.sharded_state_dict() for name, chunk in self._named()}
        if with_optimizer:
            # Newer releases have to be asked for optimizer state that another layout can read.
            known = inspect.signature(MegatronOptimizer.sharded_state_dict).parameters
            form = {"distrib_optim_sharding_type": "fully_reshardable"}
            wish = {"metadata": form} if "metadata" in known else {}
            state["optimizer"] = self._optimizer.sharded_state_dict(state, is_loading, **wish)
        return state


def _look_at(folder: Path) -> None:
    """Read the pickles of a checkpoint safely first: Megatron and torch run what is in them."""
    check_files(folder, read_metadata(folder).values())
    _check_backend(folder / "metadata.json")
    common = folder / "common.pt"
    try:
        torch.load(common, weights_only=True)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"{common}: cannot be loaded safely ({why})") from None


def _check_backend(path: Path) -> None:
    """Raise unless metadata.json names torch_dist: Megatron passes on its keys as arguments."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig

    known = {field.name: type(field.default) for field in dataclasses.fields(CheckpointingConfig)}
    known["sharded_backend"] = str  # the one without a default
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return  # Megatron has a message for it
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON ({error})") from None
    is_object = isinstance(content, dict) and content.get("sharded_backend") == "torch_dist"
    if not is_object or any(type(content[name]) is not known.get(name) for name in content):
        raise ConfigError(f"{path}: is damaged: it must name torch_dist as its sharded_backend")
