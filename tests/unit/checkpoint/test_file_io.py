"""Direct files hold what buffered ones would, on every kind of file system."""

import errno
import io
import os
import random
import tempfile
from pathlib import Path

import pytest
import xxhash

from mindspeed.checkpoint import file_io
from mindspeed.checkpoint.file_io import DirectFile


@pytest.fixture(params=["disk", "memory", "refuses writes"])
def folder(request, tmp_path, monkeypatch):
    """Yield a folder of a file system with O_DIRECT, without, and with O_DIRECT that fails."""
    monkeypatch.setattr(file_io, "BLOCK", 8192)
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
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & file_io.DIRECT:
            raise OSError(errno.EINVAL, "no")
        return write(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", refusing)


@pytest.mark.parametrize("seed", range(12))
def test_a_direct_file_holds_what_was_written(folder, seed):
    random_, expected = random.Random(seed), io.BytesIO()
    with DirectFile(folder / "file") as file:
        for _ in range(random_.randrange(40)):
            data = random_.randbytes(random_.choice([0, 1, 30, 4096, 8192, 20_000]))
            assert file.write(data) == expected.write(data)
            assert file.tell() == expected.tell()
    content = (folder / "file").read_bytes()
    assert content == expected.getvalue()
    assert file.record().parts == ((len(content), xxhash.xxh3_128_hexdigest(content)),)


def test_an_existing_file_is_not_overwritten(folder):
    (folder / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        DirectFile(folder / "file")
    assert (folder / "file").read_text() == "mine"
