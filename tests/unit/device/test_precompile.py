"""Kernels compiled by processes of their own, of a package that the tests write."""

import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from mindspeed.device import hopper, precompile
from mindspeed.device.precompile import Kernel, claimed, start

PACKAGE = """
import os
import time
from pathlib import Path


def wait_for(path):
    for _ in range(60000):  # ten minutes, for a busy machine
        if path.exists():
            return
        time.sleep(0.01)
    raise TimeoutError(path)


def meet(folder, name, other):
    "Compile a kernel while another is being compiled."
    folder = Path(folder)
    (folder / f"{name}.begun").touch()
    wait_for(folder / f"{other}.begun")
    (folder / f"{name}.o").touch()


def hang(folder):
    (Path(folder) / "pid").write_text(str(os.getpid()))
    time.sleep(600)


def fail():
    raise TypeError("no fail-closed semantic key")


def compile_once(folder):
    "Load a kernel, or compile it and note that."
    folder = Path(folder)
    if not (folder / "once.o").exists():
        with (folder / "compiled").open("a") as file:
            file.write("once\\n")
        time.sleep(0.5)
        (folder / "once.o").touch()
    return True
"""
FAKE = hopper.Package("fake-kernels", ">=1", "fake_kernels", "tests")


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "fake_kernels.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(precompile, "MIN_CORES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hopper, "kernel_cache", hopper.kernel_cache.__wrapped__)
    yield importlib.import_module("fake_kernels")
    sys.modules.pop("fake_kernels")


def test_kernels_are_compiled_at_the_same_time_and_kept(package, tmp_path, caplog):
    names = (("a", "b"), ("b", "a"))
    kernels = [Kernel(package.meet, (str(tmp_path), *each)) for each in names]
    with caplog.at_level(logging.INFO):
        FAKE.prepare(kernels, "a test")
        for _, file in FAKE._files(kernels):
            with claimed(file) as lock:
                assert lock is None  # its process has compiled it
        assert FAKE.passes(lambda: all((tmp_path / f"{k}.o").exists() for k in "ab"), "", kernels)
        FAKE.prepare(kernels, "a test")  # they are in the cache
    lines = [one.getMessage() for one in caplog.records]
    assert lines.count("fake-kernels: compiling 2 kernels for a test") == 1
    assert not any(start(*each) for each in FAKE._files(kernels))


def test_a_killed_compilation_releases_its_lock(package, tmp_path):
    kernel = Kernel(package.hang, (str(tmp_path),))
    ((_, file),) = FAKE._files([kernel])
    assert start(kernel, file) and not start(kernel, file)  # its process has the lock
    package.wait_for(tmp_path / "pid")
    while not (pid := (tmp_path / "pid").read_text()):
        time.sleep(0.01)
    os.kill(int(pid), signal.SIGKILL)
    with claimed(file) as lock:
        assert lock is not None and not file.read_bytes()
        assert not start(kernel, file)  # it is compiled here now


def test_a_compilation_ends_with_the_process_that_needs_it(package, tmp_path):
    lines = [
        "import fake_kernels, time, sys",
        "from pathlib import Path",
        "from mindspeed.device import precompile",
        "precompile.MIN_CORES = 1",
        "kernel = precompile.Kernel(fake_kernels.hang, (sys.argv[1],))",
        "precompile.start(kernel, Path(sys.argv[1], 'file'))",
        "time.sleep(600)",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    needs_it = subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines), str(tmp_path)], env=environment
    )
    package.wait_for(tmp_path / "pid")
    needs_it.kill()
    needs_it.wait()
    with claimed(tmp_path / "file") as lock:  # waits for the end of its process
        assert lock is not None


def test_a_folder_of_the_users_own_has_other_kernels(package, monkeypatch):
    keeps = replace(FAKE, cached={"FAKE_DIR": "{folder}/fake"}, uncached={"FAKE_ENABLED": "0"})
    kernel = Kernel(package.fail, ())
    files = []
    for folder in ("a", "b"):
        monkeypatch.setenv("FAKE_DIR", folder)
        files += keeps._files([kernel])
    assert files[0] != files[1]
    monkeypatch.setenv("FAKE_ENABLED", "0")
    assert keeps._files([kernel]) == []


def test_what_fails_in_its_process_is_tried_and_reported_by_the_one_that_needs_it(package, caplog):
    kernel = Kernel(package.fail, ())
    ((_, file),) = FAKE._files([kernel])
    assert start(kernel, file)
    with caplog.at_level(logging.WARNING):
        assert not FAKE.passes(package.fail, "a test", [kernel])
    (line,) = [one.getMessage() for one in caplog.records]
    assert line == "fake-kernels is not used for a test: no fail-closed semantic key"
    assert not FAKE.passes(lambda: False, "a test", [kernel]) and not file.read_bytes()
    assert FAKE.passes(lambda: True, "a test", [kernel]) and file.read_bytes()


def test_without_locks_kernels_are_compiled_where_they_are_needed(package, tmp_path):
    kernel = Kernel(package.fail, ())
    assert not start(kernel, tmp_path / "missing" / "file")
    with claimed(tmp_path / "missing" / "file") as lock:
        assert lock is None
    ((_, file),) = FAKE._files([kernel])
    assert FAKE.passes(lambda: True, "a test", [kernel]) and file.read_bytes()
    with claimed(file) as lock:
        assert lock is None  # compiled, nothing to wait for


def test_trials_at_the_same_time_compile_a_kernel_once(package, tmp_path):
    """Each opens the file itself, as ranks do: a lock of one thread holds for the others."""
    kernel = Kernel(package.compile_once, (str(tmp_path),))

    def trial(_):
        return FAKE.passes(lambda: package.compile_once(tmp_path), "a test", [kernel])

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(trial, range(3)))
    assert (tmp_path / "compiled").read_text() == "once\n"


def test_another_version_is_another_kernel(package, tmp_path):
    kernel = Kernel(package.meet, ("a", 1, True))
    files = {
        kernel.file(tmp_path, ["1.0"]),
        kernel.file(tmp_path, ["1.1"]),
        Kernel(package.meet, ("a", 2, True)).file(tmp_path, ["1.0"]),
        Kernel(package.hang, ("a", 1, True)).file(tmp_path, ["1.0"]),
    }
    assert len(files) == 4 and kernel.file(tmp_path, ["1.0"]) in files


def test_what_is_no_text_in_the_path_is_passed_over(package, tmp_path, monkeypatch):
    kernel = Kernel(package.compile_once, (str(tmp_path),))
    ((_, file),) = FAKE._files([kernel])
    (tmp_path / "elsewhere").mkdir()
    for before, executable in ((tmp_path / "elsewhere", None), (tmp_path, sys.executable)):
        monkeypatch.setattr(sys, "executable", executable)
        monkeypatch.setattr(sys, "path", [before, *sys.path])
        assert start(kernel, file) == (executable is not None)
    with claimed(file) as lock:
        assert lock is None
    assert (tmp_path / "once.o").exists()


def test_the_current_folder_is_in_the_path_of_a_process(package, tmp_path, monkeypatch):
    kernel = Kernel(package.compile_once, (str(tmp_path),))
    ((_, file),) = FAKE._files([kernel])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *(each for each in sys.path if each != str(tmp_path))])
    assert start(kernel, file)
    with claimed(file) as lock:
        assert lock is None
    assert (tmp_path / "once.o").exists()
