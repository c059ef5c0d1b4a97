"""A small GPT from Megatron's Transformer Engine spec or its local spec, and one step of it."""

import torch
import torch.distributed as dist

from mindspeed import device

VOCAB, LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH = 64, 2, 16, 4, 8, 2

SHAPES = {
    "gpt2": {"add_bias_linear": True},
    "llama": {
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "num_query_groups": 2,
    },
    "experts": {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False},
    "gated experts": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "moe_ffn_hidden_size": 24,
    },
}
# Norms are modules of their own in the local spec and part of the next linear layer in TE's.
NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def build(
    spec: str,
    shape: str,
    *,
    tp: int = 1,
    ep: int = 1,
    seed: int = 3,
    position_embedding_type: str = "rope",
    **options,
):
    """Make the ranks' groups once, and one model: spec is te, te grouped, te fused or local."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        moe_grouped_gemm=spec == "te grouped",
        **SHAPES[shape],
        **options,
    )
    parts = {"num_experts": config.num_moe_experts, "qk_layernorm": config.qk_layernorm}
    if spec == "local":
        layer = gpt_layer_specs.get_gpt_layer_local_spec(
            **parts, moe_grouped_gemm=False, normalization=config.normalization
        )
    else:
        fused = {"use_te_op_fuser": True} if spec == "te fused" else {}
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            **parts, moe_grouped_gemm=config.moe_grouped_gemm, **fused
        )
    position = {"position_embedding_type": position_embedding_type}
    return GPTModel(config, layer, VOCAB, SEQUENCE, **position)


def step(model) -> torch.Tensor:
    """Return the loss of one batch and leave the gradients in the model."""
    found = losses(model)
    found.mean().backward()
    return found.detach()


def losses(model) -> torch.Tensor:
    """Return the loss of every token of one batch."""
    generator = torch.Generator().manual_seed(99)
    tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    where = device.current().torch_device
    tokens, positions, hidden = (x.to(where) for x in (tokens, positions, hidden))
    found = model(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:])
    assert found.shape == (BATCH, SEQUENCE)
    return found


def gradients(model) -> dict[str, torch.Tensor]:
    """Return all gradients by name, summed where every rank saw a part of the tokens."""
    grads = {}
    for name, param in model.named_parameters():
        grad = param.grad.clone()
        if getattr(param, "sequence_parallel", False):
            dist.all_reduce(grad)
        grads[name] = grad
    return grads


def gathered(model, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put the tensor-parallel parts of named tensors together."""
    whole = {}
    for name, param in model.named_parameters():
        if not getattr(param, "tensor_model_parallel", False):
            whole[name] = parts[name]
            continue
        pieces = [torch.empty_like(parts[name]) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, parts[name].contiguous())
        if model.config.gated_linear_unit and "linear_fc1" in name:
            # Each rank holds a part of the gate above a part of the values.
            pieces = [piece.chunk(2)[half] for half in (0, 1) for piece in pieces]
        whole[name] = torch.cat(pieces, param.partition_dim)
    return whole


def local_name(name: str) -> str:
    """Return the local spec's name of a parameter of TE's spec."""
    for local, te in NORMS.items():
        name = name.replace(te, local)
    return name


def save(folder, spec, shape, options=None):
    """Save a model with Megatron's distributed checkpoint; return loss, gradients and weights."""
    from megatron.core import dist_checkpointing

    model = build(spec, shape, **(options or {}))
    dist_checkpointing.save(sharded(model), folder)
    losses = step(model)
    return losses, gradients(model), {n: p.detach() for n, p in model.named_parameters()}


def sharded(model):
    """Return the model's state for a distributed checkpoint."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})


def load(folder, spec, shape, **options):
    """Load a checkpoint into a model that started differently."""
    from megatron.core import dist_checkpointing

    model = build(spec, shape, seed=17, **options)
    model.load_state_dict(dist_checkpointing.load(sharded(model), folder))
    return model
