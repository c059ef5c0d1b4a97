"""Patches that other projects register by dotted name."""

import sys
from types import ModuleType

import pytest

import mindspeed
from mindspeed.patch_utils import MindSpeedPatchesManager
from mindspeed.patching import PatchError

register = MindSpeedPatchesManager.register_patch
apply_patches = MindSpeedPatchesManager.apply_patches


class Layer:
    def width(self, factor):
        return factor


def twice(x):
    return 2 * x


def thrice(x):
    return 3 * x


def negate_wrapper(function):
    def negated(x):
        return -function(x)

    return negated


@pytest.fixture(autouse=True)
def module(monkeypatch):
    made, user = ModuleType("some_client"), ModuleType("some_client.user")
    made.__path__ = []
    exec("def scale(x):\n    return x", vars(made))
    made.Layer, user.scale = Layer, made.scale
    monkeypatch.setitem(sys.modules, "some_client", made)
    monkeypatch.setitem(sys.modules, "some_client.user", user)
    yield made
    MindSpeedPatchesManager.remove_patches()
    MindSpeedPatchesManager.patches_info.clear()


def test_a_replacement_reaches_copies_and_goes_again(module):
    original = module.scale
    register("some_client.scale", twice)
    patch = MindSpeedPatchesManager.patches_info["some_client.scale"]
    assert (patch.orig_module_name, patch.orig_func_name) == ("some_client", "scale")
    assert not patch.is_applied() and patch.orig_func is original and module.scale(1) == 1
    apply_patches()
    assert patch.is_applied() and patch.orig_func is original
    assert module.scale(1) == 2 and sys.modules["some_client.user"].scale(1) == 2
    owners = [each.owner for each in mindspeed.report().patches]
    assert "registered patch of some_client.scale" in owners
    patch.remove_patch()
    assert not patch.is_applied() and module.scale is original
    patch.apply_patch()
    apply_patches()
    assert module.scale is twice


def test_wraps_stack_on_a_replacement(module):
    register("some_client.scale", negate_wrapper)
    register("some_client.scale", twice)
    apply_patches()
    assert module.scale(1) == -2


def test_a_second_replacement_needs_force(module):
    register("some_client.scale", twice)
    register("some_client.scale", twice)
    with pytest.raises(RuntimeError, match="force_patch=True"):
        register("some_client.scale", thrice)
    register("some_client.scale", thrice, force_patch=True)
    apply_patches()
    assert module.scale(1) == 3


def test_methods_and_missing_names(module):
    def width(self, factor):
        return 10 * factor

    register("some_client.Layer.width", width)
    register("some_client.added", twice, create_dummy=True)
    apply_patches()
    assert Layer().width(1) == 10 and module.added(1) == 2
    MindSpeedPatchesManager.remove_patches()
    assert Layer().width(1) == 1 and not hasattr(module, "added")


def test_what_cannot_be_patched_is_said(module):
    register("some_client.missing", twice)
    with pytest.raises(PatchError, match="some_client has no missing"):
        apply_patches()
    MindSpeedPatchesManager.patches_info.clear()
    register("some_client.scale", lambda x, y: x)
    with pytest.raises(PatchError, match="the original takes"):
        apply_patches()
    MindSpeedPatchesManager.patches_info.clear()
    with pytest.raises(ValueError, match="names no attribute"):
        register("scale", twice)


def test_a_patch_of_a_package_that_is_absent_waits():
    register("package_that_is_absent.ops.rule", twice)
    apply_patches()
    patch = MindSpeedPatchesManager.patches_info["package_that_is_absent.ops.rule"]
    assert not patch.is_applied() and patch.orig_func is None
