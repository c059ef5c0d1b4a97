"""`from mindspeed_llm import megatron_adaptor`: Megatron runs on the device at hand."""

import mindspeed.megatron_adaptor  # noqa: F401
