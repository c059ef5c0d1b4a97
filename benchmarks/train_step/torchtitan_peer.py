"""The same sizes in torchtitan's Llama or Qwen3; it ties no embeddings and has no bias."""

import importlib.util
import sys
import types

import torch

# What torchtitan's data loaders import.
_DATASETS = {
    "datasets": ("Dataset", "load_dataset"),
    "datasets.distributed": ("split_dataset_by_node",),
}


def eager(shape):
    """Build it as it is."""
    _allow_missing_datasets()
    from torchtitan.components.loss import cross_entropy_loss

    make = _qwen3 if shape.num_experts else _llama
    with torch.device("cuda"):
        model = make(shape).to(torch.bfloat16)
        with torch.no_grad():
            model.init_weights()
    return model, _mean(model, cross_entropy_loss)


def _llama(shape):
    from torchtitan.models.llama3.model.model import Transformer

    return Transformer(llama_arguments(shape))


def llama_arguments(shape):
    """Return the shape as torchtitan's Llama takes it."""
    from torchtitan.models.llama3.model.args import TransformerModelArgs

    return TransformerModelArgs(
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


def _qwen3(shape):
    from torchtitan.models.qwen3.model.model import Qwen3Model

    return Qwen3Model(qwen3_arguments(shape))


def qwen3_arguments(shape):
    """Return the shape as torchtitan's Qwen3 with experts takes it."""
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

    experts = MoEArgs(
        num_experts=shape.num_experts,
        num_shared_experts=0,
        top_k=shape.top_k,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        load_balance_coeff=None,
    )
    return Qwen3ModelArgs(
        dim=shape.hidden,
        n_layers=shape.layers,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        head_dim=shape.head_size,
        vocab_size=shape.vocabulary,
        max_seq_len=shape.sequence,
        moe_enabled=True,
        moe_inter_dim=shape.ffn,
        moe_args=experts,
    )


def compiled(shape):
    """Build it and compile each block and the loss, as its own recipe does."""
    from torchtitan.components.loss import cross_entropy_loss

    # Its experts' paddings depend on the routing.
    torch._dynamo.config.capture_scalar_outputs = True
    model, _ = eager(shape)
    for block in model.layers.values():
        block.compile(fullgraph=not shape.num_experts)
    return model, _mean(model, torch.compile(cross_entropy_loss))


def _allow_missing_datasets():
    """Allow its import without the package of its data loaders, which are unused here."""
    if "datasets" in sys.modules or importlib.util.find_spec("datasets") is not None:
        return
    for name, exported in _DATASETS.items():
        stand_in = types.ModuleType(name)
        vars(stand_in).update(dict.fromkeys(exported, object))
        sys.modules[name] = stand_in


def _mean(model, cross_entropy):
    def loss(tokens, labels):
        return cross_entropy(model(tokens), labels) / labels.numel()

    return loss
