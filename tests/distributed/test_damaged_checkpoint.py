"""A checkpoint damaged on disk gives a one-line error that says what to do."""

import json
import re
import shutil
from pathlib import Path

import pytest
import xxhash

from mindspeed.config import ConfigError
from tests.ranks import run_ranks
from tests.unit.checkpoint.test_digests import flip
from tests.unit.mindspeed_llm.training.tiny_run import (
    make_model,
    make_samples,
    settings,
    train,
    write_samples,
)

ADVICE = "; to resume from iteration 1, put 1 into"


def cut(folder):
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def rot(folder):
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[::97] = bytes(255 - value for value in content[::97])
    file.write_bytes(content)


def edit(folder):
    file = folder / "training.json"
    file.write_text(file.read_text().replace('"consumed_samples": 8', '"consumed_samples": 9'))


def mix(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("iter_0000001"), folder)


def without_digests(name, old, new):
    """Return a damage to a checkpoint of before there were digests."""

    def damage(folder):
        (folder / "digests.json").unlink()
        content = (folder / name).read_bytes()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new, 1))

    return damage


DAMAGED = "is damaged: its bytes are not those that were written"
DAMAGES = {
    "cut": (cut, "__0_0.distcp: is cut off"),
    "rotten": (rot, f"__0_0.distcp: {DAMAGED}"),
    "one bit": (lambda f: flip(f / "__0_1.distcp"), f"__0_1.distcp: {DAMAGED}"),
    "common": (lambda f: flip(f / "common.pt"), f"common.pt: {DAMAGED}"),
    "metadata": (lambda f: flip(f / ".metadata"), f".metadata: {DAMAGED}"),
    "backend": (lambda f: flip(f / "metadata.json"), f"metadata.json: {DAMAGED}"),
    "old backend": (
        without_digests("metadata.json", b"torch_dist", b"torch_disu"),
        "metadata.json: is damaged: it holds",
    ),
    "old json": (
        without_digests("metadata.json", b'"torch', b"!torch"),
        "metadata.json: is damaged (",
    ),
    "training": (edit, f"training.json: {DAMAGED}"),
    "digests": (lambda f: flip(f / "digests.json"), "digests.json: is damaged"),
    "iterations": (mix, "digests.json: is of iteration 1, not of the folder it is in"),
    "lost": (lambda f: (f / "__0_1.distcp").unlink(), "__0_1.distcp: is missing, but"),
    "no metadata": (lambda f: (f / "metadata.json").unlink(), "metadata.json: is missing, but"),
}


def _go_on_from_damaged(model, data, folder):
    from megatron.core import parallel_state

    whole = folder / "whole"
    values = settings(model, data, folder, train_iters=2, save=str(whole), save_interval=1)
    train(values)
    _check_contents(whole / "iter_0000002")
    said = {}
    for name, (damage, _) in DAMAGES.items():
        copy = folder / name
        shutil.copytree(whole, copy)
        damage(copy / "iter_0000002")
        with pytest.raises(ConfigError) as caught:
            train(values | {"save": str(copy), "train_iters": 3})
        parallel_state.destroy_model_parallel()
        said[name] = str(caught.value)
        if name not in ("cut", "one bit"):
            continue
        (copy / "latest_checkpointed_iteration.txt").write_text("1")
        train(values | {"save": str(copy), "train_iters": 3})  # as the advice says
        assert (copy / "iter_0000003").is_dir()
    return said


def _check_contents(folder):
    """Digests were made in the processes that write, and cover every file."""
    found = json.loads((folder / "digests.json").read_text())
    assert found["iteration"] == 2 and found["layout"] == dict(world=1, tp=1, pp=1, cp=1, ep=1)
    names = {path.name for path in folder.iterdir()} - {"digests.json"}
    assert found["files"].keys() == names
    for name, record in found["files"].items():
        content = (folder / name).read_bytes()
        if name.endswith(".distcp"):
            assert record["rank"] == 0 and len(record["parts"]) > 10
        for length, digest in record["parts"]:
            assert xxhash.xxh3_128_hexdigest(content[:length]) == digest
            content = content[length:]
        assert not content


def test_damage_is_reported_with_how_to_resume(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    data = write_samples(tmp_path / "data", make_samples(16))
    (said,) = run_ranks(_go_on_from_damaged, 1, model, data, tmp_path)
    for name, (_, words) in DAMAGES.items():
        assert re.search(f"{re.escape(words)}.*{ADVICE}", said[name]), said[name]
