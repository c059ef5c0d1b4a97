"""The one import of a user's script, before anything of Megatron."""

import mindspeed.megatron_adaptor  # noqa: F401
