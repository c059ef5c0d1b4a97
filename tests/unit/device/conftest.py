"""The cpu, and the facade over it for as long as a test runs."""

import pytest

from mindspeed.device.cpu import Cpu
from mindspeed.device.facade import Facade


@pytest.fixture
def cpu():
    return Cpu()


@pytest.fixture
def facade(cpu):
    with Facade(cpu):
        yield
