"""Training checkpoints: weights and optimizer in torch_dist, which any layout can load."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from packaging.version import Version
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mindspeed.checkpoint.dcp_files import check_files
from mindspeed.checkpoint.dcp_metadata import METADATA, dcp_tensors, read_dcp_metadata
from mindspeed.checkpoint.dcp_reader import verify_except_entries, weights_only
from mindspeed.checkpoint.dcp_writer import digest_writes
from mindspeed.checkpoint.digests import FileRecord
from mindspeed.compat import megatron
from mindspeed.config import ConfigError
from mindspeed.launch.process import bound_forks
from mindspeed.training.checkpoint_dir import (
    CheckpointStore,
    Mismatch,
    TrainState,
    load_error,
    reason,
)
from mindspeed_llm.training import expert_optimizer
from mindspeed_llm.training.model import RoleModel, gather_parameters

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
"""What metadata.json may hold; a release may leave some of it out."""


class MegatronCheckpoints:
    """Saves and loads the models of a run and their optimizers.

    The tensors of the first model have the names that Megatron gives them; those of further
    models are prefixed with the name of their role.
    """

    def __init__(self, root: str | None, models: Sequence[RoleModel]) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._store = CheckpointStore(root) if root else None
        self._models = models
        self._calls = AsyncCallsQueue()
        self._saving: int | None = None
        """The iteration that is being saved in the background."""

    def load(self, folder: Path, *, with_optimizer: bool, verify: bool = True) -> None:
        """Read this rank's part of a training checkpoint of any parallel sizes."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
        from torch.distributed.checkpoint import CheckpointException

        entries = verify_except_entries(folder, enabled=verify)
        metadata = read_dcp_metadata(folder)
        check_files(folder, dcp_tensors(metadata, folder).values())
        _check_backend(folder)
        wanted = self._state_dict(with_optimizer, is_loading=True)
        expert_optimizer.rename(wanted, metadata.state_dict_metadata.keys())
        _check_tensors(wanted, metadata, folder)
        if with_optimizer:
            optimizers = [wanted[names.optimizer] for names, _ in self._trained()]
            _check_optimizer(optimizers, metadata, folder)
        try:
            with weights_only(folder, metadata, entries):
                state = dist_checkpointing.load(
                    wanted,
                    str(folder),
                    TorchDistLoadShardedStrategy(),
                    validate_access_integrity=False,
                )
        except (CheckpointException, CheckpointingException) as error:
            raise load_error(folder, error) from None
        for names, model in self._named():
            for name, chunk in zip(names.chunks, model.chunks):
                chunk.load_state_dict(state[name])
        for names, model in self._trained():
            if with_optimizer:
                optimizers = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
                saved = expert_optimizer.regroup(state[names.optimizer], optimizers)
                model.optimizer.load_state_dict(saved)
            else:
                model.optimizer.reload_model_params()

    def save(
        self, state: TrainState, *, keep_last: int | None = None, in_background: bool = False
    ) -> None:
        """Save a checkpoint, if the run has a directory for it.

        In the background, what is to be written is copied now, and training may continue; `poll`
        or `finish` completes the save.
        """
        from megatron.core import dist_checkpointing

        if self._store is None:
            return
        self.finish()
        for _, model in self._trained():
            gather_parameters(model)
        # Megatron's writers would outlive a rank that is killed here, with its memory.
        with self._explain_errors(state.iteration), bound_forks():
            staging = self._store.create(state.iteration)
            tensors = self._state_dict(state.has_optimizer, is_loading=False)
            written: dict[str, FileRecord] = {}
            request = dist_checkpointing.save(
                tensors, str(staging), _save_strategy(written), async_sharded_save=in_background
            )
            sizes = _parallel_sizes()
            commit = partial(self._store.commit, staging, state, keep_last, written, **sizes)
            if request is None:
                commit()
            else:
                request.add_finalize_fn(commit)
                self._saving = state.iteration
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
        with self._explain_errors(self._saving):
            self._calls.maybe_finalize_async_calls(blocking=wait)
        if not self._calls.get_num_unfinalized_calls():
            self._saving = None

    def _explain_errors(self, iteration: int) -> AbstractContextManager[None]:
        from megatron.core.dist_checkpointing.core import CheckpointingException

        assert self._store is not None
        return self._store.explain_errors(iteration, CheckpointingException)

    def _named(self) -> Iterator[tuple["_Names", RoleModel]]:
        for number, model in enumerate(self._models):
            yield _Names.of(model, is_primary=number == 0), model

    def _trained(self) -> Iterator[tuple["_Names", RoleModel]]:
        return (pair for pair in self._named() if pair[1].optimizer is not None)

    def _state_dict(self, with_optimizer: bool, *, is_loading: bool) -> dict[str, Any]:
        """Return the sharded state dict of all models."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

        # Megatron finds this group by itself, but for the embedding of multi-token prediction.
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {"dp_cp_group": group}
        whole: dict[str, Any] = {}
        for names, model in self._named():
            state: dict[str, Any] = {}
            for stage, (name, chunk) in enumerate(zip(names.chunks, model.chunks)):
                if len(model.chunks) > 1:  # older releases number layers by it
                    parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
                state[name] = chunk.sharded_state_dict(metadata=metadata)
            if with_optimizer and model.optimizer is not None:
                if not is_loading:
                    _init_moments(model.optimizer)
                state[names.optimizer] = model.optimizer.sharded_state_dict(
                    state, is_loading, **_reshardable()
                )
            if names.prefix:
                add_prefix_for_sharding(state, names.prefix)
            whole |= state
        if not is_loading:
            _copy_strided(whole)
        return whole


def _init_moments(optimizer: Any) -> None:
    """Give an optimizer that has not updated anything yet the state that it would begin with.

    All steps may have been skipped, as the first ones with --fp16 are.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(part, "is_stub_optimizer", False) and not part.optimizer.state:
            part.init_state_fn(part.optimizer, part.config)


def _copy_strided(state: dict[str, Any]) -> None:
    """Copy tensors that are parts of larger ones to the host, one by one.

    Frozen weights beside adapters are. Megatron makes every tensor contiguous before it writes any:
    on the device that would be most of the model once more.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for value in nested_values(state):
        if isinstance(value, (ShardedTensor, ShardedTensorFactory)) and value.data is not None:
            if not value.data.is_contiguous():
                value.data = value.data.detach().cpu().contiguous()


@dataclass(frozen=True)
class _Names:
    """Entries of a model in the state dict of a checkpoint."""

    prefix: str
    chunks: list[str]
    optimizer: str

    @classmethod
    def of(cls, model: RoleModel, *, is_primary: bool) -> "_Names":
        prefix = "" if is_primary else f"{model.role.name}."
        count = len(model.chunks)
        chunks = ["model"] if count == 1 else [f"model{number}" for number in range(count)]
        return cls(prefix, [prefix + name for name in chunks], f"{prefix}optimizer")


def _reshardable() -> dict[str, Any]:
    """Return the request for optimizer state that other parallel sizes can read."""
    # Releases before 0.15 do not know the word: theirs is the default.
    if megatron.version() < Version("0.15"):
        return {}
    return {"metadata": {"distrib_optim_sharding_type": "fully_reshardable"}}


def _parallel_sizes() -> dict[str, int]:
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
    """Raise for the state of another optimizer, where Megatron only names what it did not find."""
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
    """Check the file by which Megatron chooses the reader of a checkpoint."""
    path = folder / "metadata.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: is not a distributed checkpoint: it has no {path.name}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is damaged ({reason(error)})") from None
    is_known = isinstance(values, dict) and values.items() <= BACKEND.items()
    if not is_known or "sharded_backend" not in values:
        raise ConfigError(f"{path}: is damaged: it holds {str(values)[:200]}, not {BACKEND}")


def _check_tensors(wanted: dict[str, Any], metadata: Metadata, folder: Path) -> None:
    """Raise for a checkpoint that has something else under the name of a tensor."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for value in nested_values(wanted):
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            stored = metadata.state_dict_metadata.get(value.key)
            if stored is not None and not isinstance(stored, TensorStorageMetadata):
                raise ConfigError(f"{folder / METADATA}: {value.key} is not a tensor there")
