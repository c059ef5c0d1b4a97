"""Megatron-LM's scripts start: arguments for FSDP, no nvcc, any flash-attn or none."""

import inspect
import os
import sys
import types
from argparse import Namespace
from importlib.machinery import ModuleSpec

import megatron.core.datasets
import megatron.core.utils
import pytest

from mindspeed.compat.scripts import (
    load_no_kernels,
    wrap_compile_helpers,
    wrap_validate_args,
)
from mindspeed.compat.table import TABLE
from mindspeed.patching import Patcher


def megatron_check(args, defaults=None):
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    fsdp = args.use_torch_fsdp2 or args.use_megatron_fsdp
    assert (queues != "1") if fsdp else (queues == "1")
    return args, defaults


@pytest.mark.parametrize("flag", ["use_torch_fsdp2", "use_megatron_fsdp", None])
def test_the_check_passes(monkeypatch, flag):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    args = Namespace(use_torch_fsdp2=False, use_megatron_fsdp=False)
    if flag:
        setattr(args, flag, True)
    assert wrap_validate_args(megatron_check)(args, {"a": 1}) == (args, {"a": 1})


def test_the_loader_of_legacy_kernels_is_replaced_when_it_is_imported(monkeypatch):
    def load(args):
        raise TypeError("no nvcc")

    package, module = types.ModuleType("megatron.legacy"), types.ModuleType("fused_kernels")
    package.fused_kernels, module.load = module, load
    monkeypatch.setitem(sys.modules, "megatron.legacy", package)
    monkeypatch.setitem(sys.modules, "megatron.legacy.fused_kernels", module)
    patcher = Patcher()
    [entry] = [each for each in TABLE if each.name == "no_nvcc"]
    patcher.apply(entry.name, entry.patches)
    assert module.load is load_no_kernels and module.load(None) is None
    patcher.revert()
    assert module.load is load
    assert list(inspect.signature(load).parameters) == ["args"]


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


@pytest.mark.parametrize(
    ("files", "compiles"),
    [
        ([], True),
        (["Makefile"], True),
        (["Makefile", "helpers_cpp.py"], True),  # a checkout: make knows what is out of date
        (["helpers_cpp.py"], False),
    ],
)
def test_helpers_are_compiled_where_they_can_be(monkeypatch, tmp_path, files, compiles):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(megatron.core.datasets, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(megatron.core.datasets, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "megatron.core.datasets.helpers_cpp", raising=False)
    calls = []
    wrap_compile_helpers(lambda: calls.append(1))()
    assert bool(calls) == compiles
