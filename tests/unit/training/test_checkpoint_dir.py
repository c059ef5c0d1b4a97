"""What a resume begins with: tracker, training.json, the order of a commit, the lock of a run."""

import fcntl
import json
import os
import shutil
import signal

import pytest

from mindspeed.config import ConfigError
from mindspeed.training import save_dir_lock
from mindspeed.training.checkpoint_dir import (
    CheckpointStore,
    TrainState,
    latest_checkpoint,
    read_state,
)
from mindspeed.training.checkpoint_dir import find_resume as find
from mindspeed.training.save_dir_lock import SaveDirLock, release_on_error
from mindspeed_llm.training.options import TrainOptions
from tests.ranks import run_ranks

TRACKER = "latest_checkpointed_iteration.txt"


def make(root, **changes):
    """Write the files that are checked before anything is loaded."""
    folder = root / "iter_0000002"
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    (folder / "training.json").write_text(json.dumps({"iteration": 2} | changes))
    (root / TRACKER).write_text("2\n")
    return folder


def resumed(**flags):
    return find(TrainOptions(**flags))


@pytest.mark.parametrize(
    "number", ["²", "٣", "9" * 5000, "-1", "1.5", "", "1 2"], ids=list("1234567")
)
def test_trackers_without_a_number(tmp_path, number):
    make(tmp_path)
    (tmp_path / TRACKER).write_text(number, encoding="utf-8")
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(ConfigError, match="no training checkpoint of that name"):
        resumed(save=str(tmp_path))


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("shape", 5, "shape is 5, not an object"),
        ("shape", [], "not an object"),
        ("lora", "x", "not an object"),
        ("iteration", "2", "not a number"),
        ("iteration", True, "not a number"),
        ("iteration", -2, "not a number"),
        ("iteration", 3, "is of iteration 3, not of the folder"),
        ("consumed_samples", 1.5, "not a number"),
        ("has_optimizer", 1, "not true or false"),
        ("data", None, "not a text"),
        ("more", 1, "cannot be read"),
    ],
)
def test_values_in_training_json(tmp_path, name, value, words):
    folder = make(tmp_path, **{name: value})
    with pytest.raises(ConfigError, match=words) as raised:
        read_state(folder)
    assert str(raised.value).startswith(str(folder / "training.json"))


@pytest.mark.parametrize(
    "text", ["", "5", "[]", "{", "[" * 100_000, "\x00"], ids=["0", "5", "[]", "{", "deep", "nul"]
)
def test_texts_of_training_json(tmp_path, text):
    folder = make(tmp_path)
    (folder / "training.json").write_text(text)
    with pytest.raises(ConfigError, match="training.json: cannot be read"):
        read_state(folder)


def test_a_training_without_training_json_is_not_restarted(tmp_path):
    folder, other = make(tmp_path / "run"), str(tmp_path / "new")
    root = str(tmp_path / "run")
    assert resumed(load=root) == resumed(save=root) == resumed(load=str(folder)) == folder
    (folder / "training.json").unlink()
    words = "iter_0000002 has no training.json, so its training cannot be resumed: restore the file"
    for flags in (
        {"load": root},
        {"load": root, "save": other},
        {"load": str(folder)},
        {"save": root},
        {"save": root, "load": root},
        {"save": root, "load": root, "finetune": True},
    ):
        with pytest.raises(ConfigError, match=words):
            resumed(**flags)
    assert resumed(load=root, save=other, finetune=True) is None
    assert find(TrainOptions(load=root), is_training=False) is None
    assert resumed(load=root, save=root, no_auto_resume=True, finetune=True) is None
    # Converted weights belong to no training.
    shutil.move(folder, folder.with_name("release"))
    (tmp_path / "run" / TRACKER).write_text("release")
    assert resumed(load=root, save=other) is None


def _fail_at_each_rename(root):
    """Stop a commit where a crash could, and return what the tracker says each time."""
    folders = CheckpointStore(str(root))
    folders.commit(folders.create(1), TrainState(iteration=1), None, {})
    original, found = os.rename, []

    def fail(source, target):
        raise OSError(f"no rename of {source}")

    for iteration in (1, 2):
        aside = folders.create(iteration)
        os.rename = fail
        try:
            folders.commit(aside, TrainState(iteration=iteration), None, {})
        except OSError:
            found.append((latest_checkpoint(root), read_state(latest_checkpoint(root)).iteration))
        finally:
            os.rename = original
    folders.commit(folders.create(2), TrainState(iteration=2), None, {})
    return [*found, (latest_checkpoint(root), read_state(latest_checkpoint(root)).iteration)]


def test_the_tracker_names_only_what_has_been_renamed(tmp_path):
    (found,) = run_ranks(_fail_at_each_rename, 1, tmp_path)
    first, second = tmp_path / "iter_0000001", tmp_path / "iter_0000002"
    assert found == [(first, 1), (first, 1), (second, 2)]


def test_a_forked_child_does_not_keep_the_lock(tmp_path, monkeypatch):
    """Writers of a killed run outlive it; the next run must not wait for them."""
    monkeypatch.setattr(save_dir_lock, "TRIES", 1)
    held = SaveDirLock(str(tmp_path))
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        with pytest.raises(ConfigError, match=f"process {os.getpid()} is saving there now"):
            SaveDirLock(str(tmp_path))
        held.release()
        SaveDirLock(str(tmp_path)).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_run_that_cannot_be_set_up_leaves_nothing(tmp_path):
    """Only what the lock created is removed, and a run that waits takes a file that exists."""
    kept = tmp_path / "kept"
    kept.mkdir()
    for folder in (tmp_path / "new/deeper", kept):
        with pytest.raises(ConfigError), release_on_error(SaveDirLock(str(folder))):
            raise ConfigError("--load /nowhere: does not exist")
    assert list(tmp_path.rglob("*")) == [kept]
    with pytest.raises(ConfigError), release_on_error(SaveDirLock(str(tmp_path / "new"))):
        (tmp_path / "new/log.jsonl").touch()
        raise ConfigError("too late")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["log.jsonl"]


def test_a_lock_on_a_removed_file_does_not_count(tmp_path, monkeypatch):
    """A run that failed removes the file that a waiting run may have opened before."""
    first = SaveDirLock(str(tmp_path / "saved"))
    flock = fcntl.flock

    def fail_meanwhile(file, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.discard()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", fail_meanwhile)
    second = SaveDirLock(str(tmp_path / "saved"))
    monkeypatch.setattr(save_dir_lock, "TRIES", 1)
    with pytest.raises(ConfigError, match="is saving there now"):
        SaveDirLock(str(tmp_path / "saved"))
    second.release()
