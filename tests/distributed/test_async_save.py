"""Checkpoints written in the background hold what others hold, and failures are reported."""

import ast
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import RankFailed, run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    make_model,
    make_samples,
    read_checkpoint,
    settings,
    train,
    write_samples,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("inputs")
    return make_model(folder / "hf"), write_samples(folder / "data", make_samples(16))


def test_bits_are_those_of_a_save_that_waits(inputs: tuple[str, str], tmp_path: Path) -> None:
    """Steps that follow a save must not reach into it, though it is written meanwhile."""
    for name in ("sync", "async"):
        values = settings(
            *inputs,
            tmp_path,
            save=str(tmp_path / name),
            train_iters=6,
            save_interval=2,
            keep_last=2,
            async_save=name == "async",
            use_distributed_optimizer=True,
        )
        run_ranks(train, 2, values)
    for number in (4, 6):
        found = [tmp_path / name / f"iter_{number:07d}" for name in ("sync", "async")]
        assert sorted(p.name for p in found[0].iterdir()) == sorted(
            p.name for p in found[1].iterdir()
        )
        expected, others = map(read_checkpoint, found)
        assert expected.keys() == others.keys() and any("exp_avg" in name for name in others)
        for name, tensor in expected.items():
            assert torch.equal(tensor, others[name]), (number, name)
    assert sorted(p.name for p in (tmp_path / "async").glob("*iter_*")) == [
        "iter_0000004",
        "iter_0000006",
    ]


def train_until_full(values: dict[str, Any]) -> None:
    """Train while no file may grow beyond what the second checkpoint would need."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (values.pop("limit"), resource.RLIM_INFINITY))
    train(values)


@pytest.mark.parametrize(("how", "limit"), [("sync", 40_000), ("async", 400_000)])
def test_a_full_disk_is_an_error_and_loses_nothing(
    inputs: tuple[str, str], tmp_path: Path, how: str, limit: int
) -> None:
    """Of larger tensors torch only says that the position in a file is not as expected."""
    saved = tmp_path / "saved"
    model = make_model(tmp_path / "wide", hidden_size=128, num_hidden_layers=2)
    values = settings(model, inputs[1], tmp_path, save=str(saved), train_iters=2, save_interval=2)
    run_ranks(train, 1, values)
    before = read_checkpoint(saved)
    values |= {"train_iters": 6, "async_save": how == "async", "limit": limit}
    words = f"File too large: the limit of a file is {limit} bytes"
    with pytest.raises(RankFailed, match=f"iteration 4 could not be saved .{words}"):
        run_ranks(train_until_full, 1, values)
    assert [p.name for p in saved.glob("*iter_*")] == ["iter_0000002"]
    after = read_checkpoint(saved)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


# Run where a file system of 64 KiB stands in for the disk: fill it, and say why a save fails.
FILL = """
import sys
from pathlib import Path
from mindspeed.training import disk

folder = Path(sys.argv[1])
try:
    with (folder / "file").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
except OSError as error:
    said = [error.strerror, "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"]
print([disk.explain(text, folder) for text in [*said, "Permission denied"]])
"""


def test_the_full_disk_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    script = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-Urm", "sh", "-c", script, "sh", str(folder), sys.executable, FILL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip("mounting a file system is not permitted on this machine")
    why = "No space left on device: 0 of 65536 bytes are free on the disk at"
    assert ast.literal_eval(done.stdout) == [f"{why} {folder}"] * 2 + ["Permission denied"]
