"""Stale staging directories of dead and of running writers."""

import os
from pathlib import Path

import pytest

from mindspeed.checkpoint.commit import STAGING, staged_directory


def dead():
    """Return the id of a process that has ended."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_only_stale_directories_of_dead_writers_are_removed(tmp_path):
    running, ended = (tmp_path / f".model.incomplete-{number}" for number in (os.getppid(), dead()))
    for folder in (running, ended):
        folder.mkdir()
    with staged_directory(tmp_path / "model") as staging:
        (staging / "config.json").write_text("{}")
    assert running.is_dir() and not ended.exists()
    assert (tmp_path / "model" / "config.json").read_text() == "{}"


def test_a_replaced_directory_is_restored(tmp_path):
    """A process killed between two renames leaves the old one under another name."""
    old = tmp_path / f".model.replaced-{dead()}"
    old.mkdir()
    (old / "config.json").write_text("old")
    try:
        with staged_directory(tmp_path / "model", overwrite=True):
            assert (tmp_path / "model" / "config.json").read_text() == "old"
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "config.json").read_text() == "old"


def test_ctrl_c_right_after_the_folder_was_made_leaves_nothing(tmp_path, monkeypatch):
    mkdir = Path.mkdir

    def interrupted(self, *args, **kwargs):
        mkdir(self, *args, **kwargs)
        if STAGING in self.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), staged_directory(tmp_path / "new" / "model"):
        pass
    assert not list(tmp_path.iterdir())
