"""Training checkpoints of sharded models: torch.distributed.checkpoint, in tensors only.

Every rank writes and reads its own shards; any number of ranks can resume. What is no tensor would
be pickled, so there is no such entry: learning rates and random numbers follow from the
step, which training.json stores.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mindspeed import device
from mindspeed.checkpoint.dcp_files import check_files
from mindspeed.checkpoint.dcp_metadata import DcpTensor, dcp_tensors, read_dcp_metadata
from mindspeed.checkpoint.dcp_reader import verify_except_entries, weights_only
from mindspeed.checkpoint.dcp_writer import DigestWriter
from mindspeed.config import did_you_mean
from mindspeed.distributed.process_groups import set_collective_timeout
from mindspeed.training.checkpoint_dir import CheckpointStore, Mismatch, TrainState, load_error
from mindspeed_mm.models.weights import ADAPTER, weight_targets
from mindspeed_mm.training.optimizer import make_state

MODEL, OPTIMIZER = "model.", "optimizer."


@dataclass
class _Save:
    """A save that goes on in the background."""

    future: "Future[Any]"
    writer: DigestWriter
    staging: Path
    state: TrainState
    keep_last: int | None


class FsdpCheckpoints:
    """Saves and loads the training of one sharded model."""

    def __init__(
        self,
        root: str | None,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        timeout_minutes: int | None = None,
    ) -> None:
        self._store = CheckpointStore(root) if root else None
        self._timeout_minutes = timeout_minutes
        self._model, self._optimizer = model, optimizer
        self._layout = StoredLayout()
        self._group: dist.ProcessGroup | None = None
        self._saving: _Save | None = None

    def load(self, folder: Path, *, with_optimizer: bool, verify: bool = True) -> None:
        """Read this rank's shards of a checkpoint that any number of ranks has written."""
        entries = verify_except_entries(folder, enabled=verify)
        metadata = read_dcp_metadata(folder)
        stored = dcp_tensors(metadata, folder)
        check_files(folder, stored.values())
        wanted = self._stored(self._weights(stored))
        _must_have_adapters(wanted, stored, folder)
        aliases = {MODEL + a: MODEL + b for a, b in _aliases(self._model).items()}
        state = _matched(wanted, aliases, stored, folder)
        if with_optimizer:
            state |= self._optimizer_matched(stored, folder)
        try:
            with weights_only(folder, metadata, entries):
                dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
        except dcp.CheckpointException as error:
            raise load_error(folder, error) from None

    def save(
        self, state: TrainState, *, keep_last: int | None = None, in_background: bool = False
    ) -> None:
        """Save a checkpoint, if the run has a directory for it.

        In the background, what is to be written is copied now, and training may continue; `poll`
        or `finish` completes the save.
        """
        if self._store is None:
            return
        self.finish()
        state = replace(state, tied=_aliases(self._model))
        with self._store.explain_errors(state.iteration):
            staging = self._store.create(state.iteration)
            _agree_on_buffers(self._model)
            tensors = self._state(state.has_optimizer)
            writer = DigestWriter(staging)
            if in_background:
                future: Any = dcp.async_save(
                    tensors, storage_writer=writer, process_group=self._host_group()
                )
                self._saving = _Save(future, writer, staging, state, keep_last)
            else:
                dcp.save(tensors, storage_writer=writer)
                self._store.commit(staging, state, keep_last, writer.files)
        if self._timeout_minutes is not None:  # the first save may have made groups of its own
            set_collective_timeout(self._timeout_minutes)

    def poll(self) -> None:
        """Complete a save in the background if all ranks have written."""
        if self._saving is not None:
            is_done = torch.tensor(float(self._saving.future.done()))
            is_done = is_done.to(device.current().torch_device)
            dist.all_reduce(is_done, dist.ReduceOp.MIN)
            if is_done.item():
                self.finish()

    def finish(self) -> None:
        """Wait for a save in the background and complete it."""
        if self._saving is not None:
            assert self._store is not None
            save, self._saving = self._saving, None
            with self._store.explain_errors(save.state.iteration):
                save.future.result()
                files = save.writer.files
                self._store.commit(save.staging, save.state, save.keep_last, files)

    def _host_group(self) -> dist.ProcessGroup:
        """Return a group of its own for the background: steps talk at the same time."""
        if self._group is None:
            self._group = dist.new_group(backend=device.known()["cpu"].backend)
        return self._group

    def _weights(self, stored: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return what to fill: without its adapters, if weights from before them are read."""
        if any(ADAPTER in name for name in stored):
            return weights_of(self._model)
        return _once_each(weight_targets(self._model))

    def _stored(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {MODEL + name: self._layout.of(tensor) for name, tensor in weights.items()}

    def _state(self, with_optimizer: bool) -> dict[str, torch.Tensor]:
        state = self._stored(weights_of(self._model))
        return state | (self._optimizer_state() if with_optimizer else {})

    def _optimizer_state(self) -> dict[str, torch.Tensor]:
        known = self._optimizer.state
        return {
            f"{OPTIMIZER}{name}.{key}": self._layout.of(value)
            for name, parameter in self._model.named_parameters()
            for key, value in known.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def _optimizer_matched(
        self, stored: dict[str, DcpTensor], folder: Path
    ) -> dict[str, torch.Tensor]:
        """Return the state to fill; a parameter that had no gradient yet has none to read."""
        make_state(self._optimizer)
        wanted = self._optimizer_state()
        names = {name for name in stored if name.startswith(OPTIMIZER)}
        if unknown := sorted(names - wanted.keys()):
            raise Mismatch(
                f"{folder}: holds {unknown[0]}, which this run does not train with: other "
                "parameters were trained, or with another --optimizer. Go on with what the run "
                "had, or give --no-load-optim"
            )
        for name, parameter in self._model.named_parameters():
            keys = [f"{OPTIMIZER}{name}.{key}" for key in self._optimizer.state.get(parameter, {})]
            if keys and not names & set(keys):
                del self._optimizer.state[parameter]
                for key in keys:
                    wanted.pop(key, None)
        return _matched(wanted, {}, {name: stored[name] for name in names}, folder)


class StoredLayout:
    """Views this rank's tensors as they are stored: distributed experts are parts of one tensor."""

    def __init__(self) -> None:
        self._meshes: dict[tuple[str, int], DeviceMesh] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same memory as a shard of the whole tensor.

        With expert parallelism, a tensor is sharded over the ranks that hold the same experts
        only; such a mesh has fewer ranks than the world.
        """
        if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == dist.get_world_size():
            return tensor
        parts = dist.get_world_size() // tensor.device_mesh.size()
        shape = torch.Size([tensor.shape[0] * parts, *tensor.shape[1:]])
        with torch.no_grad():
            return DTensor.from_local(
                tensor.to_local(),
                self._experts_first(tensor.device_mesh.device_type, parts),
                [Shard(0), tensor.placements[0]],
                run_check=False,
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )

    def _experts_first(self, device: str, parts: int) -> DeviceMesh:
        """Return all ranks as (part of the experts, those that hold the same part)."""
        if (device, parts) not in self._meshes:
            ranks = torch.arange(dist.get_world_size()).view(-1, parts).T
            self._meshes[device, parts] = DeviceMesh(device, ranks.contiguous())
        return self._meshes[device, parts]


@torch.no_grad()
def _agree_on_buffers(model: nn.Module) -> None:
    """Let all ranks have the first rank's buffers, such as the means of a batch norm.

    A checkpoint holds them once: without this, ranks that go on from it would have others than
    those that never stopped.
    """
    kept = model.state_dict(keep_vars=True)
    here = device.current().torch_device
    for name, buffer in model.named_buffers():
        if name in kept and buffer.is_floating_point() and not isinstance(buffer, DTensor):
            values = buffer.detach().to(here).contiguous()
            dist.broadcast(values, 0)
            buffer.copy_(values)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and the buffers that are kept, tied ones under their first name."""
    return _once_each(model.state_dict(keep_vars=True))


def _once_each(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), (name, value.detach()))
    return dict(found.values())


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied weights, each with the first one."""
    first: dict[int, str] = {}
    others = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(value), name) != name:
            others[name] = first[id(value)]
    return others


def _matched(
    wanted: dict[str, torch.Tensor],
    aliases: dict[str, str],
    stored: dict[str, DcpTensor],
    folder: Path,
) -> dict[str, torch.Tensor]:
    """Return the tensors to fill by the names they are stored under; all have to be there."""
    for other, name in aliases.items():
        if name not in stored and other in stored:
            wanted = {other if key == name else key: value for key, value in wanted.items()}
    prefix = OPTIMIZER if any(name.startswith(OPTIMIZER) for name in wanted) else MODEL
    names = {name for name in stored if name.startswith(prefix)} - aliases.keys()
    _must_be_none(wanted.keys() - stored.keys(), "has no", names, folder)
    _must_be_none(names - wanted.keys(), "holds", wanted, folder)
    for name, tensor in wanted.items():
        if stored[name].shape != tuple(tensor.shape):
            raise Mismatch(
                f"{folder}: {name} has the shape {stored[name].shape}, the model wants "
                f"{tuple(tensor.shape)}"
            )
    return wanted


def _must_have_adapters(wanted: Iterable[str], stored: Iterable[str], folder: Path) -> None:
    """Refuse a checkpoint whose adapters stand beside other layers than those of this run."""
    theirs = {name for name in stored if name.startswith(MODEL) and ADAPTER in name}
    ours = {name for name in wanted if ADAPTER in name}
    if theirs and theirs != ours:
        raise Mismatch(
            f"{folder}: holds adapters ({len(theirs)} tensors) and this run has others "
            f"({len(ours)}): give the `lora` of that run, or add its adapters to the weights by "
            "mindspeed-mm convert"
        )


def _must_be_none(names: Iterable[str], what: str, others: Iterable[str], folder: Path) -> None:
    if found := sorted(names):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise Mismatch(
            f"{folder}: {what} {found[0]}{more}: it is of another model; "
            f"{did_you_mean(found[0], others)}"
        )
