"""What a directory is, or what was looked for in it."""

import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint import detect


def test_hf(llama):
    found = detect(llama)
    assert (found.kind, found.folder, found.config_folder) == ("hf", llama, llama)


def test_mcore_and_one_iteration_of_it(mcore):
    for path in (mcore, mcore / "iter_0000001"):
        found = detect(path)
        assert (found.kind, found.folder) == ("mcore", mcore / "iter_0000001")
        assert found.config_folder == mcore / "hf"


def test_torch_dist(tmp_path):
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / ".metadata").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    found = detect(tmp_path)
    assert (found.kind, found.folder, found.config_folder) == (
        "torch_dist",
        tmp_path / "release",
        None,
    )


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "says '': it must be a number or release"),
        ("../../etc", "must be a number or release"),
        ("7", "says 7, but there is no iter_0000007"),
    ],
)
def test_trackers_that_lead_nowhere(tmp_path, content, message):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(content)
    with pytest.raises(ConfigError, match=message):
        detect(tmp_path)


def test_nothing_there(tmp_path, llama):
    with pytest.raises(
        ConfigError, match="holds no weights: looked for latest_.*mp_rank.*model.saf"
    ):
        detect(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        detect(tmp_path / "missing")
    with pytest.raises(ConfigError, match="is a file, not a directory"):
        detect(llama / "config.json")
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(ConfigError, match="iter_0000003: holds no weights"):
        detect(tmp_path)


@pytest.mark.parametrize("text", ["²", "١٢", "-3", "1.5", "latest", ""])
def test_a_tracker_that_holds_no_number(tmp_path, text):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="it must be a number or release"):
        detect(tmp_path)
