"""What every test rank needs, imported once by the server from which ranks are forked."""

import atexit
import gc
import importlib
import os

gc.disable()  # until all is imported: it stays

import torch  # noqa: E402

IMPORTED_BY = os.getpid()

# One thread: ranks share few cores, and a forked process must not inherit a thread pool.
torch.set_num_threads(1)

# Nothing outlives a test: no wait for the disk. A descriptor that is not open is an error still.
os.fsync = os.fdatasync = lambda descriptor: os.fstat(descriptor) and None

for _name in (
    "mindspeed.megatron_adaptor",  # before anything of Megatron, as in a user's script
    "hypothesis",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel",
    "mindspeed.ops.gmm.reference",  # operators are imported with their first call
    "mindspeed.ops.norm.reference",
    "mindspeed_llm.generation.inference",
    "mindspeed_llm.models.families.deepseek2",
    "mindspeed_llm.tasks.posttrain.launcher",
    "mindspeed_llm.tasks.pretrain",
    "mindspeed_mm.training.trainer",
    "peft",
    "pytest",
    "torch._dynamo",  # torch.optim imports it with the first optimizer: half a second a rank
    "transformers.models.llama.modeling_llama",
):
    importlib.import_module(_name)

# A rank that collects garbage would visit, and so copy, all that it shares with the server. A train
# loop unfreezes at its end, the commands collect then; what is shared stays frozen.
gc.collect()
gc.freeze()
gc.enable()
atexit.register(gc.unfreeze)  # or Triton, unloaded at the exit, complains of leaks
gc.unfreeze = lambda: None
