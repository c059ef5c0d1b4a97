"""A folder of checkpoints: which stay, which is the latest_checkpoint, and who may write there."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed.config import ConfigError
from mindspeed.training.checkpoint_dir import TrainState, latest_checkpoint, read_state
from mindspeed.training.save_dir_lock import SaveDirLock
from mindspeed_llm.training.checkpoint import MegatronCheckpoints
from mindspeed_llm.training.model import ModelRole, RoleModel


@pytest.fixture(autouse=True)
def one_rank():
    from megatron.core import parallel_state

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def sharded_state_dict(metadata):
    from megatron.core.dist_checkpointing import ShardedTensor

    return {"weight": ShardedTensor.from_rank_offsets("weight", torch.ones(4))}


def save(root, iteration, keep_last=None):
    model = SimpleNamespace(sharded_state_dict=sharded_state_dict)
    policy = RoleModel(ModelRole("policy"), None, [model], [])
    state = TrainState(iteration, 4 * iteration, has_optimizer=False)
    MegatronCheckpoints(str(root), [policy]).save(state, keep_last=keep_last)


def names(root):
    return sorted(path.name for path in root.iterdir() if "iter_" in path.name)


def test_the_newest_stay(tmp_path):
    for iteration in (2, 4, 6, 8, 10):
        save(tmp_path, iteration, keep_last=2)
    assert names(tmp_path) == ["iter_0000008", "iter_0000010"]
    found = latest_checkpoint(tmp_path)
    assert found == tmp_path / "iter_0000010"
    assert (read_state(found).iteration, read_state(found).consumed_samples) == (10, 40)


def test_all_stay_when_nothing_is_said(tmp_path):
    for iteration in (2, 4, 6):
        save(tmp_path, iteration)
    assert names(tmp_path) == [f"iter_{iteration:07d}" for iteration in (2, 4, 6)]


def test_later_ones_of_a_run_before_stay(tmp_path):
    """A run that went back to iteration 2 does not remove what it may be compared with."""
    save(tmp_path, 2)
    save(tmp_path, 8)
    save(tmp_path, 4, keep_last=1)
    assert names(tmp_path) == ["iter_0000004", "iter_0000008"]
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000004"


def test_what_a_killed_run_left_is_removed(tmp_path):
    save(tmp_path, 2)
    (tmp_path / ".iter_0000004.incomplete-abcd").mkdir()
    save(tmp_path, 4)
    assert names(tmp_path) == ["iter_0000002", "iter_0000004"]


def test_the_tracker_follows_the_rename(tmp_path, monkeypatch):
    """Killed in between, the tracker names the checkpoint before, which is whole."""
    save(tmp_path, 2)

    rename = os.rename

    def fail(source, target):
        if os.path.basename(target) == "iter_0000004":
            raise OSError("killed")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(ConfigError, match="iteration 4 could not be saved"):
        save(tmp_path, 4)
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000002"


def test_a_forked_writer_does_not_keep_the_folder(tmp_path):
    lock = SaveDirLock(str(tmp_path))
    child = os.fork()
    if not child:  # outlives the run, as a process that still writes a checkpoint does
        signal.pause()
        os._exit(0)
    try:
        lock.release()
        SaveDirLock(str(tmp_path)).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
