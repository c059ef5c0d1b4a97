"""Damage to a file that has a digest is an error that names it, whatever the damage."""

import json
import logging
import random
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from mindspeed.checkpoint import digests
from mindspeed.checkpoint.dcp_writer import DigestWriter
from mindspeed.checkpoint.digests import FileRecord, Hasher, read_digests, verify, write_digests
from mindspeed.config import ConfigError
from tests.ranks import run_ranks


def flip(path, position=None, bit=0):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture
def folder(tmp_path):
    """A folder of three files, two of the same length."""
    root = tmp_path / "iter_0000002"
    (root / "below").mkdir(parents=True)
    for number, name in enumerate(("a", "below/b")):
        (root / name).write_bytes(random.Random(number).randbytes(5000))
    (root / ".hidden").write_text("x")
    write_digests(root, {}, {"kind": "test", "iteration": 2}, {"a": {"rank": 0}})
    return root


def damage_of(folder, **how):
    with pytest.raises(ConfigError) as raised:
        verify(folder, **how)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("name", ["a", "below/b", ".hidden"])
def test_every_file_is_covered(folder, name):
    verify(folder)
    keep = (folder / name).read_bytes()
    flip(folder / name)
    assert damage_of(folder).startswith(f"{folder / name}: is damaged: its bytes are not those")
    verify(folder, enabled=False)
    (folder / name).write_bytes(keep + b"x")
    assert "is too long" in damage_of(folder)
    (folder / name).write_bytes(keep[:-1])
    assert "is cut off" in damage_of(folder)
    (folder / name).unlink()
    assert damage_of(folder).startswith(f"{folder / name}: is missing, but digests.json lists it")


def test_files_and_iterations_that_were_swapped(folder):
    (folder / "a").rename(folder / "c")
    (folder / "below/b").rename(folder / "a")
    (folder / "c").rename(folder / "below/b")
    assert f"{folder / 'a'}: holds what belongs to {folder / 'below/b'}" in damage_of(folder)
    other = folder.with_name("iter_0000003")
    folder.rename(other)
    assert "digests.json: is of iteration 2, not of the folder it is in" in damage_of(other)


def test_every_flip_in_the_digests_themselves(folder):
    path = folder / "digests.json"
    keep = path.read_bytes()
    for position in range(len(keep)):
        flip(path, position, position % 8)
        with pytest.raises(ConfigError, match="digests.json: is damaged"):
            read_digests(folder)
        path.write_bytes(keep)
    for text in ("", "5", "[]", "{}", '{"digest": 1}', "[" * 50_000):
        path.write_text(text)
        assert "digests.json: is damaged" in damage_of(folder)


def test_folders_without_digests_are_read_with_one_warning(folder, caplog):
    (folder / "digests.json").unlink()
    flip(folder / "a")
    with caplog.at_level(logging.WARNING):
        verify(folder)
        verify(folder, is_expected=False)
        verify(folder, enabled=False)
    (record,) = caplog.records
    assert "has no digests.json: damage to its files is not detected" in record.message


def test_parts_of_a_stream(monkeypatch):
    monkeypatch.setattr(digests, "PART", 10)
    data = bytes(range(25))
    hasher = Hasher()
    for start in range(0, 25, 7):
        hasher.update(data[start : start + 7])
    pieces = (data[:10], data[10:20], data[20:])
    expected = tuple((len(piece), xxhash.xxh3_128_hexdigest(piece)) for piece in pieces)
    assert hasher.record() == FileRecord(expected) and hasher.record().size == 25
    assert Hasher().record().parts == ((0, xxhash.xxh3_128_hexdigest(b"")),)


@pytest.mark.filterwarnings("ignore")
def test_a_writer_digests_what_it_writes_and_ranges_choose(tmp_path):
    folder = tmp_path / "dcp"
    state = {f"w{i}": torch.full((100, 7), float(i)) for i in range(5)} | {"step": 3}
    writer = DigestWriter(folder)
    dcp.save(state, storage_writer=writer, no_dist=True)
    (record,) = writer.files.values()
    content = (folder / "__0_0.distcp").read_bytes()
    assert record.size == len(content) and len(record.parts) == 6
    start = 0
    for length, digest in record.parts:
        assert xxhash.xxh3_128_hexdigest(content[start : start + length]) == digest
        start += length
    dcp.load(state, checkpoint_id=folder, no_dist=True)  # torch itself can still read it
    write_digests(folder, writer.files, {})
    assert json.loads((folder / "digests.json").read_text())["files"].keys() == {
        ".metadata",
        "__0_0.distcp",
    }
    flip(folder / "__0_0.distcp", len(content) - 3)
    last = len(content) - record.parts[-1][0]
    verify(folder, ranges={"__0_0.distcp": [(0, 5), (last - 5, 5)]})
    for wanted in ([(last - 5, 6)], [(last, 1)], [(0, 1), (last + 100, 1)]):
        assert "__0_0.distcp: is damaged" in damage_of(folder, ranges={"__0_0.distcp": wanted})


def _verify_shares(folder):
    try:
        verify(folder, is_shared=True)
    except ConfigError as error:
        return str(error)
    return ""


def test_every_rank_learns_what_one_found(folder):
    assert run_ranks(_verify_shares, 2, folder) == ["", ""]
    keep = folder.with_name("keep")
    shutil.copytree(folder, keep)
    for name in ("a", "below/b"):
        shutil.rmtree(folder)
        shutil.copytree(keep, folder)
        flip(folder / name)
        first, second = run_ranks(_verify_shares, 2, folder)
        assert first == second and first.startswith(f"{folder / name}: is damaged")
