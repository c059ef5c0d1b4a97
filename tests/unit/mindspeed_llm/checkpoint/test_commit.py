"""What writers that died or still run have left beside a directory."""

import os

from mindspeed_llm.checkpoint.commit import written_aside


def dead():
    """The number of a process that has ended."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_only_the_remains_of_dead_writers_are_removed(tmp_path):
    running, ended = (tmp_path / f".model.incomplete-{number}" for number in (os.getppid(), dead()))
    for folder in (running, ended):
        folder.mkdir()
    with written_aside(tmp_path / "model") as aside:
        (aside / "config.json").write_text("{}")
    assert running.is_dir() and not ended.exists()
    assert (tmp_path / "model" / "config.json").read_text() == "{}"


def test_a_directory_that_was_taken_away_is_put_back(tmp_path):
    """Killed between two renames, the old one stands aside."""
    old = tmp_path / f".model.replaced-{dead()}"
    old.mkdir()
    (old / "config.json").write_text("old")
    try:
        with written_aside(tmp_path / "model", overwrite=True):
            assert (tmp_path / "model" / "config.json").read_text() == "old"
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "config.json").read_text() == "old"
