"""The installed megatron-core is found and checked, and megatron.training is served."""

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from mindspeed.compat import megatron


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an empty megatron.core before the installed one, and hide triton."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "triton", None)
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (tmp_path / "megatron" / "__init__.py").touch()
    _write(core, "__init__", "")
    _set_version(core, "0, 20, 0")
    return core


def _write(core: Path, module: str, text: str) -> None:
    file = core.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    importlib.invalidate_caches()


def _set_version(core: Path, numbers: str, pre_release: str = "") -> None:
    major, minor, patch = numbers.split(", ")
    lines = [f"MAJOR = {major}", f"MINOR = {minor}", f"PATCH = {patch}"]
    # A real one also asks git for a commit; nothing of it is run.
    lines += [f"PRE_RELEASE = '{pre_release}'", "raise SystemExit('executed')"]
    _write(core, "package_info", "\n".join(lines))


def test_the_installed_one_is_found_and_usable() -> None:
    assert megatron.version() == Version(importlib.metadata.version("megatron-core"))
    megatron.require()


def test_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for name in [n for n in sys.modules if n.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    assert megatron.location() is None
    with pytest.raises(RuntimeError, match="not installed: pip install 'megatron-core>=0.12.1'"):
        megatron.require()


@pytest.mark.parametrize(
    ("numbers", "pre"), [("0, 11, 0", ""), ("0, 12, 0", ""), ("0, 12, 1", "rc2")]
)
def test_too_old(package: Path, numbers: str, pre: str) -> None:
    _set_version(package, numbers, pre)
    found = numbers.replace(", ", ".") + pre
    with pytest.raises(RuntimeError, match=f"{found} in .* too old: 0.12.1 or newer is needed"):
        megatron.require()


def test_a_package_without_a_version_is_refused(package: Path) -> None:
    _write(package, "package_info", "pass")
    with pytest.raises(RuntimeError, match="does not state its version"):
        megatron.require()


def test_nothing_is_imported_to_find_out(package: Path) -> None:
    assert megatron.location() == package
    megatron.require()
    assert "megatron.core" not in sys.modules


@pytest.mark.parametrize(
    "chain",
    [
        {"__init__": "from megatron.core import a\n", "a": "import triton.language as tl\n"},
        {"__init__": "from megatron.core.b import c\n", "b.__init__": "from .d import e\n",
         "b.d": "from ..f.g import (\n    h,\n)\n", "f.g": "from triton import jit\n"},
        {"__init__": "import megatron.core.i\n", "i.__init__": "from . import j\n",
         "i.j": "import triton\n"},
    ],
)  # fmt: skip
def test_an_unavoidable_import_of_triton_is_announced(package: Path, chain: dict[str, str]) -> None:
    for module, text in chain.items():
        _write(package, module, text)
    with pytest.raises(RuntimeError, match="imports triton on every machine .*pip install triton"):
        megatron.require()


def test_imports_of_triton_that_can_be_missed_are_fine(package: Path) -> None:
    _write(package, "__init__", "from megatron.core import a\n")
    _write(package, "a", "try:\n    import triton\nexcept ImportError:\n    pass\n")
    _write(package, "never_imported", "import triton\n")
    megatron.require()


SCRIPT = """
import sys
import {suite}
from megatron.training import get_args
from megatron.training.global_vars import get_args as of_the_globals
assert get_args is of_the_globals
assert "megatron.core" not in sys.modules and "torch" not in sys.modules
try:
    get_args()
except RuntimeError as error:
    print(error)
import megatron.training
try:
    megatron.training.print_rank_0
except AttributeError as error:
    print(error)
"""


@pytest.mark.parametrize("suite", ["mindspeed_llm", "mindspeed_mm"])
def test_a_script_without_the_adaptor_gets_the_arguments(suite):
    script = [sys.executable, "-c", SCRIPT.format(suite=suite)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "there are no arguments yet: they are there once a run has started",
        "megatron.training is not installed and its stand-in has no print_rank_0, only get_args "
        "and get_model: put a checkout of Megatron-LM on PYTHONPATH",
    ], done.stderr


BUILD = """
import torch
import mindspeed.megatron_adaptor
from megatron.core import parallel_state
from megatron.training.training import get_model  # the name in Megatron-LM's own scripts
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel()
try:
    get_model(lambda: exit(print("built")))
finally:
    torch.distributed.destroy_process_group()
"""


def test_a_model_is_built_from_the_module_that_megatron_has_it_in():
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True)
    assert done.stdout == "built\n", done.stderr


def test_a_real_package_is_left_alone(tmp_path):
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("get_args = 'of Megatron-LM'\n")
    script = "import mindspeed_mm\nfrom megatron.training import get_args\nprint(get_args)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout.strip() == "of Megatron-LM", done.stderr
