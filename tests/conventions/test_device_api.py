"""Only mindspeed/device knows how a device is spelled; kernels are written for theirs."""

import ast

import pytest

from tests.conventions.source import imports, sources

BACKENDS = {"nccl", "hccl", "gloo"}
KERNELS = ("npu_impl.py", "triton_impl.py")


def is_free(source):
    return source.room == "mindspeed/device" or source.path.name in KERNELS


@pytest.mark.parametrize("source", [s for s in sources() if not is_free(s)], ids=lambda s: s.name)
def test_no_device_api_outside_its_room(source):
    for name, line in imports(source):
        assert not name.startswith(("torch.cuda", "torch_npu", "torch.npu")), (source.name, line)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "npu"):
            is_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            assert not is_torch, f"{source.name}:{node.lineno} says torch.{node.attr}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in BACKENDS, f"{source.name}:{node.lineno} says {node.value}"
