"""Put a client's packages into a folder beside the environment, which stays as it is."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.clients.table import DEFAULT_CORE, Client

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".clients"
STAMP = ".installed"
ANY_PYTHON = ["--ignore-requires-python", "--python-version=3.12", "--only-binary=:all:"]
LIBRARIES = "site-packages"
"""The adaptor tells installed libraries by this name of a folder, see mindspeed.device.facade."""


def folders(client: Client, core: str) -> list[Path]:
    """Return what stands before the environment on the search path of the client's processes."""
    beside = [] if core == DEFAULT_CORE else [FOLDER / f"megatron-core-{core}"]
    return [each / LIBRARIES for each in (*beside, FOLDER / client.name)]


def is_installed(client: Client) -> bool:
    """Return whether the client's folder holds the pinned packages."""
    return _is_current(FOLDER / client.name, client.requirements)


def install(client: Client, core: str = DEFAULT_CORE) -> None:
    """Install what is missing for the client and for the core that it is checked with."""
    _install(FOLDER / client.name, client.requirements)
    if core != DEFAULT_CORE:
        # A core that declares Python 3.12 runs on an older one too, without what is compiled in
        # it: the index builder of its datasets.
        older = sys.version_info < (3, 12)
        _install(FOLDER / f"megatron-core-{core}", [f"megatron-core=={core}"] + ANY_PYTHON * older)


def _is_current(folder: Path, requirements: Sequence[str]) -> bool:
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text() == _stamp(requirements)


def _install(folder: Path, requirements: Sequence[str]) -> None:
    if _is_current(folder, requirements):
        return
    # Into a second folder first: an installation that breaks off leaves nothing that looks whole.
    partial = folder.with_name(f"{folder.name}.partial")
    for each in (partial, folder):
        shutil.rmtree(each, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    libraries = partial / LIBRARIES
    command += ["--disable-pip-version-check", "--target", str(libraries), *requirements]
    subprocess.run(command, check=True)
    if (libraries / "torch").exists():
        raise RuntimeError(f"{folder.name} would bring its own torch: list no such package")
    # verl's wheel has its tests at the top, where they hide these.
    shutil.rmtree(libraries / "tests", ignore_errors=True)
    (partial / STAMP).write_text(_stamp(requirements))
    partial.rename(folder)


def _stamp(requirements: Sequence[str]) -> str:
    version = ".".join(map(str, sys.version_info[:2]))
    return "\n".join([f"python {version}", *requirements, ""])


def main() -> int:
    """Install the clients that are named on the command line."""
    from tests.clients.table import CLIENTS

    for client in CLIENTS:
        if client.name in sys.argv[1:]:
            install(client)
    return 0


if __name__ == "__main__":
    sys.exit(main())
