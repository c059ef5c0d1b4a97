"""The cpu, the facade over it for as long as a test runs, and pages that are surely resident."""

import mmap

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


@pytest.fixture
def resident_pages():
    """Return pages of 64 MiB, resident until they are closed.

    They come from mmap: malloc may hand out pages that were resident before and keep them after.
    """
    size = 64 * 2**20
    pages = mmap.mmap(-1, size)
    pages[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)  # touches every page
    return pages
