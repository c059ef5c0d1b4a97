"""The adaptor comes before Megatron in every test session, as in every script."""

import mindspeed.megatron_adaptor  # noqa: F401
