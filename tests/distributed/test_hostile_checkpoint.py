"""Training checkpoints that would run code are refused on resume and --load, in both suites."""

import io
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from mindspeed.config import ConfigError
from tests.mm import runs
from tests.ranks import run_ranks
from tests.unit.checkpoint.test_dcp_metadata import Command, dataclass_chain
from tests.unit.mindspeed_llm.training.tiny_run import (
    make_model,
    make_samples,
    settings,
    train,
    write_samples,
)


def append(folder, value):
    """Put an object at the end of a .distcp, and return where it is."""
    stream = io.BytesIO()
    torch.save(value, stream)
    file = sorted(folder.glob("*.distcp"))[0]
    offset = file.stat().st_size
    file.write_bytes(file.read_bytes() + stream.getvalue())
    return file.name, offset, len(stream.getvalue())


def redirect(folder, name, value):
    """Let an entry of the metadata point at an object, whatever the entry was."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn.startswith(name))
    info = metadata.storage_data.pop(index)
    info.relative_path, info.offset, info.length = append(folder, value)
    object.__setattr__(index, "offset", None)
    metadata.storage_data[index] = info
    metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def extra_state(folder, marker):
    redirect(folder, "decoder.layers.self_attention.linear_qkv._extra_state", [Command(marker)])


def weight(folder, marker):
    redirect(folder, "decoder.layers.mlp.linear_fc1.weight", Command(marker))


def metadata_chain(folder, marker):
    (folder / ".metadata").write_bytes(dataclass_chain(marker))


def common(folder, marker):
    torch.save({"optimizer": Command(marker)}, folder / "common.pt")


def other_backend(folder, marker):
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')


def broken_backend(folder, marker):
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_d')


ATTACKS = {
    extra_state: r"__0_0.distcp: the entry decoder.*_extra_state/shard_0_4 cannot be loaded safely",
    weight: r"\.metadata: decoder.layers.mlp.linear_fc1.weight is not a tensor there",
    metadata_chain: r"\.metadata: refused: it names .*_get_device_module",
    common: r"common.pt: cannot be loaded safely",
    other_backend: r"metadata.json: is damaged: it holds",
    broken_backend: r"metadata.json: is damaged",
}


def _attack_llm(model, data, folder):
    from megatron.core import parallel_state

    whole, marker = folder / "whole", folder / "ran"
    values = settings(model, data, folder, train_iters=1, save=str(whole))
    train(values)
    for attack, words in ATTACKS.items():
        copy = folder / attack.__name__
        shutil.copytree(whole, copy)
        attack(copy / "iter_0000001", marker)
        (copy / "iter_0000001/digests.json").unlink()  # an attacker would make new ones
        for changes in ({"save": str(copy)}, {"load": str(copy), "save": None}):
            if "load" in changes and attack not in (extra_state, metadata_chain):
                continue  # the same function reads both
            with pytest.raises(ConfigError, match=words):
                train(values | {"train_iters": 2} | changes)
            parallel_state.destroy_model_parallel()
        assert not marker.exists(), attack.__name__


def test_llm(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    data = write_samples(tmp_path / "data", make_samples(16))
    run_ranks(_attack_llm, 1, model, data, tmp_path)


def _attack_mm(folder):
    marker = folder / "ran"

    def once(name, **changes):
        run = runs.make_run(runs.options(folder / name, **changes), {})
        runs.train_once(run, runs.user_callbacks())

    once("whole", train_iters=1)
    for attack, words in (
        (metadata_chain, r"\.metadata: refused: it names .*_get_device_module"),
        (lambda f, m: redirect(f, "model.", Command(m)), "holds|has no model"),
        (lambda f, m: redirect(f, "optimizer.", Command(m)), "has no optimizer|another model"),
    ):
        copy = folder / "copy"
        shutil.copytree(folder / "whole", copy)
        attack(copy / "iter_0000001", marker)
        (copy / "iter_0000001/digests.json").unlink()  # an attacker would make new ones
        with pytest.raises(ConfigError, match=words):
            once("copy", train_iters=2)
        with pytest.raises(ConfigError, match=words):
            once("new", train_iters=2, load=str(copy))
        assert not marker.exists()
        shutil.rmtree(copy)
        shutil.rmtree(folder / "new", ignore_errors=True)


def test_mm(tmp_path: Path) -> None:
    run_ranks(_attack_mm, 1, tmp_path)
