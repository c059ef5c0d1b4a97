"""What every test rank needs, imported once by the server from which ranks are forked."""

import importlib.util

import pytest  # noqa: F401
import torch

# One thread: ranks share few cores, and a forked process must not inherit a thread pool.
torch.set_num_threads(1)

if importlib.util.find_spec("mindspeed.megatron_adaptor") is not None:
    import mindspeed.megatron_adaptor  # noqa: F401

import megatron.core.distributed  # noqa: E402, F401
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402, F401
import megatron.core.models.gpt.gpt_model  # noqa: E402, F401
import megatron.core.optimizer  # noqa: E402, F401
import megatron.core.pipeline_parallel.schedules  # noqa: E402, F401
import megatron.core.tensor_parallel  # noqa: E402, F401
