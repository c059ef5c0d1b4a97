"""The kind of a checkpoint directory, or an error that lists what was searched for."""

import pytest

from mindspeed.checkpoint.detection import detect
from mindspeed.config import ConfigError


@pytest.fixture
def llama(tmp_path):
    """Return a folder with the files of an HF model."""
    folder = tmp_path / "llama"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    return folder


@pytest.fixture
def mcore(tmp_path):
    """Return a converted checkpoint of two stages."""
    for stage in range(2):
        folder = tmp_path / "mg" / "iter_0000001" / f"mp_rank_00_{stage:03d}"
        folder.mkdir(parents=True)
        (folder / "model_optim_rng.pt").touch()
    (tmp_path / "mg" / "latest_checkpointed_iteration.txt").write_text("1")
    (tmp_path / "mg" / "hf").mkdir()
    (tmp_path / "mg" / "hf" / "config.json").touch()
    return tmp_path / "mg"


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
def test_trackers_without_a_checkpoint(tmp_path, content, message):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(content)
    with pytest.raises(ConfigError, match=message):
        detect(tmp_path)


def test_folders_without_weights(tmp_path, llama):
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
