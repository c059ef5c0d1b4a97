"""The one import of a user's script, before anything of Megatron; kernels run interpreted."""

import os

# Read where a kernel is declared: before the first import of one.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

import mindspeed.megatron_adaptor  # noqa: E402, F401


@pytest.fixture(autouse=True)
def poisoned():
    """Let torch fill what it allocates with NaN, so that a number never written is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
