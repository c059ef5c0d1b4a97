"""A checkpoint that was damaged on the disk is told in one line, and so is what to do."""

import re
import shutil
from pathlib import Path

import pytest

from mindspeed.config import ConfigError
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    make_model,
    make_samples,
    settings,
    train,
    write_samples,
)

ADVICE = "; to go on from iteration 1, put 1 into"


def cut(folder):
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def rot(folder):
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[::97] = bytes(255 - value for value in content[::97])
    file.write_bytes(content)


def flip(name, old, new):
    def damage(folder):
        content = (folder / name).read_bytes()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new, 1))

    return damage


DAMAGES = {
    "cut": (cut, "__0_0.distcp: is cut off"),
    "rotten": (rot, "iter_0000002: cannot be loaded (PytorchStreamReader failed"),
    "lost": (lambda f: (f / "__0_1.distcp").unlink(), "__0_1.distcp: is missing, but .metadata"),
    "flipped metadata.json": (
        flip("metadata.json", b'"torch', b"!torch"),
        "metadata.json: is damaged (",
    ),
    "another backend": (
        flip("metadata.json", b"torch_dist", b"torch_disu"),
        "metadata.json: is damaged: it says",
    ),
    "another key": (
        flip("metadata.json", b"common_back", b"common_bacj"),
        "metadata.json: is damaged: it says",
    ),
    "no metadata": (lambda f: (f / "metadata.json").unlink(), "is not a distributed checkpoint"),
}


def _go_on_from_damaged(model, data, folder):
    from megatron.core import parallel_state

    whole = folder / "whole"
    values = settings(model, data, folder, train_iters=2, save=str(whole), save_interval=1)
    train(values)
    said = {}
    for name, (damage, _) in DAMAGES.items():
        copy = folder / name
        shutil.copytree(whole, copy)
        damage(copy / "iter_0000002")
        with pytest.raises(ConfigError) as caught:
            train(values | {"save": str(copy), "train_iters": 3})
        parallel_state.destroy_model_parallel()
        said[name] = str(caught.value)
        (copy / "latest_checkpointed_iteration.txt").write_text("1")
        train(values | {"save": str(copy), "train_iters": 3})  # as the advice says
        assert (copy / "iter_0000003").is_dir()
    return said


def test_damage_is_told_with_the_way_to_go_on(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    data = write_samples(tmp_path / "data", make_samples(16))
    (said,) = run_ranks(_go_on_from_damaged, 1, model, data, tmp_path)
    for name, (_, words) in DAMAGES.items():
        assert re.search(f"{re.escape(words)}.*{ADVICE}", said[name]), said[name]
