"""Another project's own code on the adaptor; `make clients` runs every one of them."""

import subprocess
import sys

import pytest

from tests.clients.install import FOLDER, is_installed
from tests.clients.table import CLIENTS, DEFAULT_CORE

CLIENT = next(each for each in CLIENTS if each.name == "mcore-bridge")


@pytest.mark.skipif(not is_installed(CLIENT), reason="make setup could not install mcore-bridge")
def test_mcore_bridge_loads_trains_and_exports():
    command = [sys.executable, "-m", "tests.clients", "--only", CLIENT.name]
    command += ["--core", DEFAULT_CORE]
    command += ["--model", "qwen3_moe", "--layout", "PP 2,EP 2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    log = (FOLDER / f"{CLIENT.name}-{DEFAULT_CORE}.log").read_text()
    assert result.returncode == 0, result.stdout + result.stderr + log[-4000:]
    assert "2 of 2 cases" in result.stdout
