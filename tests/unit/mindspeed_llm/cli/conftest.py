"""What tests of commands share."""

import pytest


@pytest.fixture(scope="module")
def no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr("os." + name, lambda descriptor: None)
        yield
