"""Every operator has a line on the page that lists them, and it is true."""

import re
from pathlib import Path

import pytest

import mindspeed.ops
from mindspeed.ops.dispatch import known_ops

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operators.md").read_text()


@pytest.mark.parametrize("name", mindspeed.ops.__all__)
def test_exports_are_on_the_page(name):
    assert re.search(rf"^\|.*`{name}`", PAGE, re.MULTILINE)


@pytest.mark.parametrize("op", known_ops().values(), ids=lambda op: op.name)
def test_operators_are_on_the_page_with_what_runs_them(op):
    line = re.search(rf"^\|.*`(?:npu_)?{op.name}`.*$", PAGE, re.MULTILINE)
    assert line, f"docs/operators.md does not list {op.name}"
    *_, on_cuda, on_npu, _ = (cell.strip() for cell in line[0].split("|"))
    devices = {impl.device for impl in op.impls}
    has_kernel = on_cuda not in ("torch", "token_rows")  # the latter: made of another operator
    assert has_kernel == ("cuda" in devices), f"docs/operators.md on {op.name} and CUDA"
    assert (on_npu == "torch_npu") == ("npu" in devices), f"docs/operators.md on {op.name} and npu"
