"""A Megatron-LM script starts without nvcc."""

import inspect
import sys
import types

from mindspeed.compat import legacy_kernels
from mindspeed.compat.table import TABLE
from mindspeed.patching import Patcher


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
    assert module.load is legacy_kernels.load and module.load(None) is None
    patcher.revert()
    assert module.load is load
    assert list(inspect.signature(load).parameters) == ["args"]
