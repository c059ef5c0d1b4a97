"""Entries loaded from .distcp files match their digests, or a one-line error names the file."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mindspeed.checkpoint import dcp_reader, digests
from mindspeed.checkpoint.dcp_metadata import read_dcp_metadata
from mindspeed.checkpoint.dcp_reader import EntryVerifier, verify_except_entries, weights_only
from mindspeed.checkpoint.dcp_writer import DigestWriter
from mindspeed.checkpoint.digests import read_digests, write_digests
from mindspeed.config import ConfigError
from mindspeed.training.checkpoint_dir import load_error
from tests.ranks import run_ranks
from tests.unit.checkpoint.test_digests import flip

FILE = "__0_0.distcp"
DAMAGED = "is damaged: its bytes are not those that were written; take the folder from a copy"
pytestmark = pytest.mark.filterwarnings("ignore")


def state_of(seed):
    """Return a tensor of several steps and one shorter than a step, a small one, and no tensor."""
    draw = torch.Generator().manual_seed(seed)
    large = torch.randn(5 * dcp_reader.STEP // 8 + 7, generator=draw)
    return {
        "large": large,
        "small": large[:70].reshape(10, 7).clone(),
        "step": seed,
        "w": large[:5],
    }


def save(folder, seed=1, has_entries=True):
    writer = DigestWriter(folder)
    dcp.save(state_of(seed), storage_writer=writer, no_dist=True)
    write_digests(folder, writer.files if has_entries else {}, {})


def entry_ranges(folder):
    """Return (offset, length) of each entry."""
    found = read_dcp_metadata(folder).storage_data.items()
    return {index.fqn: (info.offset, info.length) for index, info in found}


def load(folder, names=("large", "small", "step", "w"), verifier=None):
    """Load what is named, as the suites do; return it, or the error they raise."""
    wanted = {name: value for name, value in state_of(0).items() if name in names}
    try:
        with weights_only(
            folder,
            read_dcp_metadata(folder),
            verifier or EntryVerifier(folder, read_digests(folder)),
        ):
            dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    except dcp.CheckpointException as error:
        return str(load_error(folder, error))
    return wanted


def test_what_was_written_is_loaded(tmp_path):
    save(tmp_path)
    loaded = load(tmp_path)
    for name, value in state_of(1).items():
        assert loaded[name] == value if name == "step" else torch.equal(loaded[name], value)


def test_one_bit_anywhere_in_an_entry_that_is_loaded(tmp_path):
    """Also where the archive, its pickle or the values after the first step cannot be read."""
    save(tmp_path)
    file, found = tmp_path / FILE, entry_ranges(tmp_path)
    keep = file.read_bytes()
    for name, (offset, length) in found.items():
        others = [each for each in found if each != name]
        step = max(1, length // 12)
        for position in {0, 1, 30, length - 1, length - 20, *range(40, length, step)}:
            if position >= length:
                continue
            flip(file, offset + position, position % 8)
            assert load(tmp_path, [name]).startswith(f"{file}: {DAMAGED}"), (name, position)
            file.write_bytes(keep)
        flip(file, offset + length // 2)
        assert not isinstance(load(tmp_path, others), str), "what is not loaded is not compared"
        file.write_bytes(keep)


def test_entries_of_another_checkpoint_or_file(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    save(first, 1), save(second, 2)
    shutil.copy(second / FILE, first / FILE)
    assert load(first).startswith(f"{first / FILE}: {DAMAGED}")
    shutil.rmtree(first)
    save(first, 1)
    twin = first / "__1_0.distcp"
    shutil.copy(first / FILE, twin)
    (first / "digests.json").unlink()
    flip(twin, entry_ranges(first)["large"][0])
    write_digests(first, {name: record_of(first, name) for name in (FILE, twin.name)}, {})
    swapped = twin.rename(first / "x")
    (first / FILE).rename(twin)
    swapped.rename(first / FILE)
    assert load(first).startswith(f"{first / FILE}: holds what belongs to {twin}")


def record_of(folder, name):
    """Return the digests of a file by entries."""
    content = (folder / name).read_bytes()
    parts = sorted(entry_ranges(folder).values())
    hashed = [(n, digests.xxhash.xxh3_128_hexdigest(content[at : at + n])) for at, n in parts]
    return digests.FileRecord(tuple(hashed))


def test_digests_without_entries(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "PART", 1 << 20)
    save(tmp_path, has_entries=False)
    file, found = tmp_path / FILE, entry_ranges(tmp_path)
    assert not isinstance(load(tmp_path), str)
    flip(file, found["large"][0] + 3_000_000)
    assert load(tmp_path, ["large"]).startswith(f"{file}: {DAMAGED}")


def test_values_are_read_once_and_entries_hashed_once(tmp_path, monkeypatch):
    save(tmp_path)
    reads = []
    original = os.preadv

    def counting(descriptor, buffers, offset):
        reads.append(original(descriptor, buffers, offset))
        return reads[-1]

    monkeypatch.setattr(os, "preadv", counting)
    verifier = EntryVerifier(tmp_path, read_digests(tmp_path))
    load(tmp_path, ["large"], verifier)
    offset, length = entry_ranges(tmp_path)["large"]
    assert length <= sum(reads) < length + 8000
    offset, length = entry_ranges(tmp_path)["large"]
    assert verifier.open(FILE, offset, length) is None
    entry = verifier.open(FILE, *entry_ranges(tmp_path)["small"])
    assert entry.seek(-3, os.SEEK_END) == entry.tell() == entry.range.length - 3
    assert len(entry.read()) == 3 and entry.read(5) == b""
    verifier.finish()


def _load_own(*folders):
    """Load another entry on each rank; return the error of each folder."""
    name = ("large", "small")[torch.distributed.get_rank()]
    errors = []
    for folder in folders:
        wanted = {name: state_of(0)[name]}
        try:
            verifier = verify_except_entries(folder, enabled=True)
            with weights_only(folder, read_dcp_metadata(folder), verifier):
                dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder))
        except dcp.CheckpointException as error:
            errors.append(str(load_error(folder, error)))
        except ConfigError as error:
            errors.append(str(error))
    return errors


def test_damage_that_one_rank_reads_ends_all(tmp_path: Path) -> None:
    whole, small, rest = (tmp_path / name for name in ("whole", "small", "rest"))
    for folder in (whole, small, rest):
        save(folder)
    flip(small / FILE, sum(entry_ranges(small)["small"]) - 100)
    flip(rest / ".metadata")
    first, second = run_ranks(_load_own, 2, whole, small, rest)
    assert first == second and len(first) == 2
    assert first[0].startswith(f"{small / FILE}: {DAMAGED}")
    assert first[1].startswith(f"{rest / '.metadata'}: {DAMAGED}")


def test_damage_is_raised_instead_of_its_consequence(tmp_path):
    """A verifier that finds nothing leaves the error of torch as it is."""
    save(tmp_path)
    flip(tmp_path / FILE, entry_ranges(tmp_path)["small"][0])
    (tmp_path / "digests.json").unlink()
    write_digests(tmp_path, {FILE: record_of(tmp_path, FILE)}, {})
    error = load(tmp_path, ["small"])
    assert error.startswith(f"{tmp_path}: cannot be loaded (") and "damaged" not in error
    with pytest.raises(ConfigError, match="is read while"), weights_only(tmp_path, None):
        dcp.FileSystemReader(tmp_path.parent).read_metadata()
