"""Adds the benchmarked shape to torchtitan's Llama or Qwen3, whose trainer imports this."""

import json
import os

from train_step import torchtitan_peer
from train_step.shapes import Shape

_shape = Shape(**json.loads(os.environ["BENCHMARK_SHAPE"]))

if _shape.num_experts:
    from torchtitan.models.qwen3 import qwen3_args as _flavors

    _flavors["benchmark"] = torchtitan_peer.qwen3_arguments(_shape)
else:
    from torchtitan.models.llama3 import llama3_args as _flavors

    _flavors["benchmark"] = torchtitan_peer.llama_arguments(_shape)
