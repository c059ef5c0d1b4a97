"""Every operator has a true line on the page that lists them."""

import re
from pathlib import Path

import mindspeed.ops
from mindspeed.ops.dispatch import known_ops
from tests.conventions.source import assert_none

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operators.md").read_text()


def test_exports_are_on_the_page():
    names = mindspeed.ops.__all__
    assert_none(n for n in names if not re.search(rf"^\|.*`{n}`", PAGE, re.MULTILINE))


def wrong_lines():
    for op in known_ops().values():
        line = re.search(rf"^\|.*`(?:npu_)?{op.name}`.*$", PAGE, re.MULTILINE)
        if not line:
            yield f"docs/operators.md does not list {op.name}"
            continue
        *_, on_cuda, on_npu, _ = (cell.strip() for cell in line[0].split("|"))
        devices = {impl.device for impl in op.impls}
        has_kernel = on_cuda not in ("torch", "token_rows")  # the latter: made of another operator
        if has_kernel != ("cuda" in devices):
            yield f"docs/operators.md on {op.name} and CUDA"
        if (on_npu == "torch_npu") != ("npu" in devices):
            yield f"docs/operators.md on {op.name} and npu"


def test_the_page_names_what_runs_each_operator():
    assert_none(wrong_lines())
