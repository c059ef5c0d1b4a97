"""Training checkpoints: weights and optimizer in torch_dist, which any layout can load."""

import inspect
import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mindspeed.checkpoint.dcp_files import check_files
from mindspeed.checkpoint.dcp_metadata import METADATA, dcp_tensors, read_dcp_metadata
from mindspeed.checkpoint.dcp_reader import verify_except_entries, weights_only
from mindspeed.checkpoint.dcp_writer import digest_writes
from mindspeed.checkpoint.digests import FileRecord
from mindspeed.config import ConfigError
from mindspeed_llm.training.folders import (
    CheckpointFolders,
    Mismatch,
    Progress,
    reason,
    unloadable,
)

_STATE = re.compile(r"^(?:.*\.)?optimizer\.state\.(\w+)\.", re.MULTILINE)
"""The names of an optimizer's state, and in them its kinds: exp_avg, momentum_buffer, ..."""
_MASTERS = {"param", "fp32_param"}
"""Copies of the weights, which optimizers of other layouts or precisions keep in other ways."""

BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What metadata.json may say; a release may leave some of it out."""


class Checkpoints:
    """Saves and loads the training of one model."""

    def __init__(self, root: str | None, chunks: list[Any], optimizer: Any) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._folders = CheckpointFolders(root) if root else None
        self._chunks, self._optimizer = chunks, optimizer
        self._calls = AsyncCallsQueue()
        self._saving: int | None = None
        """The iteration that is being saved in the background."""

    def load(self, folder: Path, *, with_optimizer: bool, verify: bool = True) -> None:
        """Read this rank's part of a training checkpoint of any layout."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
        from torch.distributed.checkpoint import CheckpointException

        entries = verify_except_entries(folder, enabled=verify)
        metadata = read_dcp_metadata(folder)
        check_files(folder, dcp_tensors(metadata, folder).values())
        _check_backend(folder)
        wanted = self._state(with_optimizer, is_loading=True)
        _must_be_tensors(wanted, metadata, folder)
        if with_optimizer:
            _check_optimizer(wanted["optimizer"], metadata, folder)
        try:
            with weights_only(folder, metadata, entries):
                state = dist_checkpointing.load(
                    wanted,
                    str(folder),
                    TorchDistLoadShardedStrategy(),
                    validate_access_integrity=False,
                )
        except (CheckpointException, CheckpointingException) as error:
            raise unloadable(folder, error) from None
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
            written: dict[str, FileRecord] = {}
            request = dist_checkpointing.save(
                state, str(aside), _save_strategy(written), async_sharded_save=in_background
            )
            commit = partial(self._folders.commit, aside, progress, keep_last, written, **_layout())
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


def _layout() -> dict[str, int]:
    """Return the degrees of parallelism of this run."""
    from megatron.core import parallel_state

    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }


def _save_strategy(written: dict[str, FileRecord]) -> Any:
    """Return Megatron's strategy, which digests what it writes and leaves the plans out.

    Only a second save by the same process could use the plans of all ranks, which are larger than
    the rest of .metadata.
    """
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    class Strategy(TorchDistSaveShardedStrategy):
        def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, *more: Any) -> Any:
            digest_writes(writer, written)
            if planned[1] is not None:  # the first rank's
                vars(planned[1]).pop("all_local_plans", None)
            return super()._get_save_and_finalize_callbacks(writer, planned, *more)

    return Strategy("torch_dist", 1)


def _check_optimizer(wanted: Any, metadata: Metadata, folder: Path) -> None:
    """Refuse the state of another optimizer, of which Megatron only says what it did not find."""
    ours = set(_STATE.findall("\n".join(_keys(wanted))))
    theirs = set(_STATE.findall("\n".join(metadata.state_dict_metadata)))
    is_other = bool(ours) != bool(theirs) or (ours ^ theirs) & _MASTERS
    if is_other or not ours <= theirs:
        held, kept = (", ".join(sorted(kinds)) or "nothing" for kinds in (theirs, ours))
        raise Mismatch(
            f"{folder}: holds the state of another optimizer ({held}) than this run has ({kept}): "
            "resume with the --optimizer, --use-distributed-optimizer and precision of that run, "
            "or give --no-load-optim"
        )


def _keys(state: Any) -> Iterator[str]:
    """Yield the names that the tensors of a nested state are stored under."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for value in state:
            yield from _keys(value)
    elif isinstance(key := getattr(state, "key", None), str):
        yield key


def _check_backend(folder: Path) -> None:
    """Check the file by which Megatron chooses what reads a checkpoint."""
    path = folder / "metadata.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: is not a distributed checkpoint: it has no {path.name}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is damaged ({reason(error)})") from None
    is_known = isinstance(values, dict) and values.items() <= BACKEND.items()
    if not is_known or "sharded_backend" not in values:
        raise ConfigError(f"{path}: is damaged: it says {str(values)[:200]}, not {BACKEND}")


def _must_be_tensors(wanted: dict[str, Any], metadata: Metadata, folder: Path) -> None:
    """Refuse a checkpoint that has something else under the name of a tensor."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for value in nested_values(wanted):
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            stored = metadata.state_dict_metadata.get(value.key)
            if stored is not None and not isinstance(stored, TensorStorageMetadata):
                raise ConfigError(f"{folder / METADATA}: {value.key} is not a tensor there")
