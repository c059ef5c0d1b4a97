"""The adaptor comes before Megatron in every test session, as in every script."""

import signal

import mindspeed.megatron_adaptor  # noqa: F401
from tests.budget import load_profile

load_profile()

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would all that the
# tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
