"""A direct file holds what an ordinary one would, on every kind of file system."""

import errno
import io
import os
import random
import tempfile
from pathlib import Path

import pytest
import xxhash

from mindspeed_llm.checkpoint import direct_file
from mindspeed_llm.checkpoint.direct_file import DirectFile


@pytest.fixture(params=["disk", "memory", "refuses writes"])
def folder(request, tmp_path, monkeypatch):
    """A file system with direct writing, one without, and one that only pretends."""
    monkeypatch.setattr(direct_file, "BLOCK", 8192)
    if request.param == "memory":
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("no file system in memory here")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            yield Path(name)
        return
    if request.param == "refuses writes":
        refuse_direct_writes(monkeypatch)
    yield tmp_path


def refuse_direct_writes(monkeypatch):
    import fcntl

    write = os.pwrite

    def refusing(descriptor, data, position):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & direct_file.DIRECT:
            raise OSError(errno.EINVAL, "no")
        return write(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", refusing)


@pytest.mark.parametrize("seed", range(12))
def test_it_holds_what_was_written(folder, seed):
    random_, expected = random.Random(seed), io.BytesIO()
    with DirectFile(folder / "file") as file:
        for _ in range(random_.randrange(40)):
            data = random_.randbytes(random_.choice([0, 1, 30, 4096, 8192, 20_000]))
            assert file.write(data) == expected.write(data)
            assert file.tell() == expected.tell()
    content = (folder / "file").read_bytes()
    assert content == expected.getvalue()
    assert file.record().parts == ((len(content), xxhash.xxh3_128_hexdigest(content)),)


def test_it_is_never_written_over_another(folder):
    (folder / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        DirectFile(folder / "file")
    assert (folder / "file").read_text() == "mine"
