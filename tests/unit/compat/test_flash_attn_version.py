"""The question for flash-attn's version has an answer with and without flash-attn."""

import sys
import types
from importlib.machinery import ModuleSpec

import megatron.core.utils
import pytest


@pytest.fixture
def flash_attn(monkeypatch):
    module = types.ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.__version__ = "2.6.3"
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(megatron.core.utils, "_fa_version", None)
    return module


def test_none_is_too_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert megatron.core.utils.is_fa_min_version("1.0") is False


def test_another_package_in_its_folder_is_too_old(flash_attn):
    del flash_attn.__version__
    assert megatron.core.utils.is_fa_min_version("1.0") is False


def test_an_installed_one_is_compared(flash_attn):
    assert megatron.core.utils.is_fa_min_version("2.6.3")
    assert not megatron.core.utils.is_fa_min_version("2.6.3", check_equality=False)
    assert not megatron.core.utils.is_fa_min_version("2.7.3")
