"""The same sizes in torchtitan's Llama; it ties no embeddings and has no bias."""

import importlib.util
import sys
from unittest.mock import MagicMock

import torch


def eager(shape):
    """Build it as it is."""
    _allow_missing_datasets()
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    arguments = TransformerModelArgs(
        dim=shape.hidden,
        n_layers=shape.layers,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        ffn_dim_multiplier=shape.ffn / int(8 * shape.hidden / 3),
        multiple_of=256,
        max_seq_len=shape.sequence,
        rope_theta=1000000,
    )
    with torch.device("cuda"):
        model = Transformer(arguments).to(torch.bfloat16)
        with torch.no_grad():
            model.init_weights()
    return model, _mean(model, cross_entropy_loss)


def compiled(shape):
    """Build it and compile each block and the loss, as its own recipe does."""
    from torchtitan.components.loss import cross_entropy_loss

    model, _ = eager(shape)
    for block in model.layers.values():
        block.compile(fullgraph=True)
    return model, _mean(model, torch.compile(cross_entropy_loss))


def _allow_missing_datasets():
    """Let it be imported without the package of its data loaders, which nobody uses here."""
    if "datasets" not in sys.modules and importlib.util.find_spec("datasets") is None:
        sys.modules |= dict.fromkeys(("datasets", "datasets.distributed"), MagicMock())


def _mean(model, cross_entropy):
    def loss(tokens, labels):
        return cross_entropy(model(tokens), labels) / labels.numel()

    return loss
