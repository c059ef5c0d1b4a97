"""Adds the benchmarked shape to torchtitan's Llama, whose trainer imports this."""

import json
import os

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

_shape = json.loads(os.environ["BENCHMARK_SHAPE"])

llama3_args["benchmark"] = TransformerModelArgs(
    dim=_shape["hidden"],
    n_layers=_shape["layers"],
    n_heads=_shape["heads"],
    n_kv_heads=_shape["kv_heads"],
    vocab_size=_shape["vocabulary"],
    ffn_dim_multiplier=_shape["ffn"] / int(8 * _shape["hidden"] / 3),
    multiple_of=256,
    rope_theta=1000000,
)
