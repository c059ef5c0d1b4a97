"""Only mindspeed/device names device APIs and backends; kernels are written for theirs."""

import ast

from tests.conventions.source import assert_none, imports, sources

BACKENDS = {"nccl", "hccl", "gloo"}
KERNELS = ("npu_impl.py", "triton_impl.py")


def device_names():
    for source in sources():
        if source.folder == "mindspeed/device" or source.path.name in KERNELS:
            continue
        for name, line in imports(source):
            if name.startswith(("torch.cuda", "torch_npu", "torch.npu")):
                yield f"{source.name}:{line} imports {name}"
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr in ("cuda", "npu"):
                if isinstance(node.value, ast.Name) and node.value.id == "torch":
                    yield f"{source.name}:{node.lineno} uses torch.{node.attr}"
            if isinstance(node, ast.Constant) and node.value in BACKENDS:
                yield f"{source.name}:{node.lineno} names {node.value}"


def test_device_api_stays_in_its_folder():
    assert_none(device_names())
