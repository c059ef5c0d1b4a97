"""Tests of this folder run where the chosen device is a real CUDA one, and say so elsewhere."""

import pytest

from mindspeed import device


@pytest.fixture(autouse=True)
def _cuda() -> None:
    # torch.cuda.is_available() would not do: on a cpu the adaptor answers it with yes.
    if device.current().name != "cuda":
        pytest.skip("needs a CUDA device")
