"""`mindspeed doctor` on this machine and on ones with missing parts."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed import device
from mindspeed.doctor import Check, Status, checks

ROOT = Path(__file__).resolve().parents[3]


def _doctor(*arguments: str, python: tuple[str, ...] = (), **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *python, "-m", "mindspeed", "doctor", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def _by_name(text: str) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(text)["checks"]}


def _site_packages_without(folder: Path, *prefixes: str) -> str:
    """Return a path that holds what is installed here, except for some distributions."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(prefixes) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return os.pathsep.join([str(folder), str(ROOT)])


def test_this_machine_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINDSPEED_DEVICE", raising=False)
    code, out = _doctor("--json")
    found = _by_name(out)
    assert code == 0 and json.loads(out)["ready"] is True, out
    for name in ("python", "torch", "megatron-core", "chosen device", "process group", "adaptor"):
        assert found[name]["status"] == "ok", found[name]
    assert "run a kernel of" in found["operators"]["detail"]
    # The installer's records are an independent account of the same facts.
    for name in ("torch", "megatron-core", "debugpy"):
        installed = importlib.metadata.version(name)
        assert found[name]["detail"].split()[0].partition("+")[0] == installed.partition("+")[0]


def test_without_torch_and_megatron_it_still_reports(tmp_path: Path) -> None:
    path = _site_packages_without(tmp_path, "torch", "megatron", "debugpy")
    code, out = _doctor(python=("-S",), PYTHONPATH=path)
    lines = {line.split()[1]: line for line in out.splitlines()[:-1]}
    assert code == 1
    assert out.splitlines()[-1] == "not ready: fix the lines marked fail"
    assert lines["torch"].startswith("fail") and "-> pip install torch" in lines["torch"]
    assert lines["megatron-core"].startswith("fail")
    assert "pip install 'megatron-core>=0.12.1'" in lines["megatron-core"]
    assert lines["debugpy"].startswith("warn") and "-> pip install debugpy" in lines["debugpy"]


def test_every_obstacle_is_listed_at_once(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 11\nPATCH = 0\nPRE_RELEASE = ''\n")
    code, out = _doctor("--json", PYTHONPATH=str(tmp_path), MINDSPEED_DEVICE="npu")
    found = _by_name(out)
    assert code == 1
    failed = {name for name, check in found.items() if check["status"] == "fail"}
    assert failed == {"megatron-core", "chosen device"}
    assert "0.11.0" in found["megatron-core"]["detail"]
    assert "MINDSPEED_DEVICE=npu cannot be used here" in found["chosen device"]["detail"]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_without_a_traceback_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that is out of memory."""
    monkeypatch.setattr(checks, "_reduce_once", _die)
    found = checks.check_process_group(device.current())
    assert found.status is Status.FAIL
    assert found.detail.startswith("gloo: rank 0 of 1 was killed by SIGKILL")


@pytest.mark.parametrize(
    ("name", "oldest", "others"),
    [
        ("flash-attn-4", "4.0.0b36", ("4.0.0b4", "4.1")),
        ("quack-kernels", "0.6.5", ("0.5.3", "0.7")),
    ],
)
def test_faster_packages_are_recommended_on_hopper(
    monkeypatch: pytest.MonkeyPatch, name: str, oldest: str, others: tuple[str, ...]
) -> None:
    hopper, ampere = (SimpleNamespace(capability=lambda at=at: at) for at in ((9, 0), (8, 0)))
    versions: dict[str, str] = {}

    def version(distribution: str) -> str:
        if distribution not in versions:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return versions[distribution]

    def found() -> Check:
        (check,) = [check for check in checks.check_hopper(hopper) if check.name == name]
        return check

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert checks.check_hopper(ampere) == []
    assert found().status is Status.WARN and f"{name}[cu13]>={oldest}" in found().remedy
    for other in others:
        versions[name] = other
        assert found().status is Status.WARN and f"{other} is not >={oldest}" in found().detail
    versions[name] = oldest
    assert found().status is Status.OK and oldest in found().detail
