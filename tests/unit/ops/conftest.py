"""The one import of a user's script, before anything of Megatron; kernels run interpreted."""

import os

# Read where a kernel is declared: before the first import of one.
os.environ.setdefault("TRITON_INTERPRET", "1")

import mindspeed.megatron_adaptor  # noqa: E402, F401
