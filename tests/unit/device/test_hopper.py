"""Where kernels of packages are kept."""

import importlib.metadata
import os
import stat
import types

import pytest

from mindspeed import device
from mindspeed.device import hopper
from mindspeed.device.precompile import Kernel


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    for answer in (hopper.kernel_cache, hopper._is_usable):
        monkeypatch.setattr(hopper, answer.__name__, answer.__wrapped__)


def test_compiled_kernels_are_the_users_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = hopper.kernel_cache()
    assert folder == tmp_path / "mindspeed" / "kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)  # others could put code there
    assert hopper.kernel_cache() is None


def test_without_a_place_nothing_is_kept(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert hopper.kernel_cache() is None
    (line,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "compiled in every run" in line and "set XDG_CACHE_HOME" in line
    assert hopper.QUACK.passes(lambda: True, "a test", [Kernel(afresh, ())])


@pytest.mark.parametrize("has_folder", [True, False])
def test_packages_hear_where_to_keep_kernels(monkeypatch, tmp_path, has_folder):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path if has_folder else tmp_path / "file"))
    monkeypatch.setattr(type(device.current()), "capability", lambda _: hopper.CAPABILITY)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.6.5")
    names = ("QUACK_CACHE_DIR", "QUACK_CACHE_ENABLED")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    monkeypatch.setattr(os, "environ", kept)
    monkeypatch.setattr(hopper.importlib, "import_module", lambda _: types.ModuleType("quack"))
    assert hopper.QUACK.is_here()
    folder = str(tmp_path / "mindspeed" / "kernels" / "quack") if has_folder else None
    assert os.environ.get("QUACK_CACHE_DIR") == folder
    assert os.environ.get("QUACK_CACHE_ENABLED") == (None if has_folder else "0")
