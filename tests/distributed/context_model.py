"""A small GPT of Megatron, trained over context-, tensor- and pipeline-parallel ranks."""

from functools import partial

import torch

import mindspeed
from tests.distributed.te_model import local_name

VOCAB, LAYERS, HIDDEN, HEADS, GROUPS = 32, 2, 16, 4, 2
LENGTH, BATCH, STEPS = 16, 2, 4
DOCUMENTS = (5, 8, 2, 13)
"""Packed documents; every one is padded to a multiple of PADDED tokens."""
PADDED = 8
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}


def train(
    cp, tp=1, pp=1, spec="te", comm_type="p2p", packed=False, steps=STEPS, window=1, **options
):
    """Return the losses of some steps with Adam, the same on all ranks."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.gpt.training import destroy_groups

    if spec == "local":
        mindspeed.enable(context_parallel_algo="megatron_cp_algo", use_flash_attn=True)
    elif window > 1:
        mindspeed.enable(cp_window_size=window)
    hybrid = {"hierarchical_context_parallel_sizes": [2, cp // 2]} if "+" in comm_type else {}
    parallel_state.initialize_model_parallel(tp, pp, context_parallel_size=cp, **hybrid)
    model, optimizer = _build(spec, cp, tp, pp, comm_type, packed, options)
    batches = _batches(packed, steps)
    run = get_forward_backward_func()
    losses = []
    for batch in batches:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = run(
            forward_step_func=_forward_step,
            data_iterator=iter([batch] * 2),
            model=[model],
            num_microbatches=2,
            seq_length=batch["tokens"].shape[1],
            micro_batch_size=batch["tokens"].shape[0],
            forward_only=False,
        )
        optimizer.step()
        losses.append(_whole_loss(found))
    destroy_groups()
    return losses


def logits(cp, comm_type, changed=None, window=1):
    """Return this rank's logits of each packed document; one of them may have other tokens."""
    from megatron.core import parallel_state

    from tests.gpt.training import destroy_groups

    if window > 1:
        mindspeed.enable(cp_window_size=window)
    hybrid = {"hierarchical_context_parallel_sizes": [2, cp // 2]} if "+" in comm_type else {}
    parallel_state.initialize_model_parallel(context_parallel_size=cp, **hybrid)
    model, _ = _build("te", cp, 1, 1, comm_type, True, {})
    (batch,) = _batches(True, 1)
    padded = batch["bounds"][1].tolist()
    if changed is not None:
        rows = slice(padded[changed], padded[changed] + DOCUMENTS[changed])
        batch["tokens"][:, rows] = (batch["tokens"][:, rows] + 1) % VOCAB
    batch["row"] = torch.arange(padded[-1]).unsqueeze(0)
    batch, params = _on_this_rank(batch)
    out = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=params)[0]
    destroy_groups()
    real = batch["loss_mask"][0] > 0
    row, out = batch["row"][0][real], out[real].detach()
    ends = torch.tensor(padded[1:])
    return [out[torch.bucketize(row, ends, right=True) == n] for n in range(len(DOCUMENTS))]


def mtp_losses(cp, tp=1, **options):
    """Return this rank's rows and the losses of their labels; that of one step on, a gradient."""
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from tests.gpt.training import destroy_groups

    parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
    model, _ = _build("te", cp, tp, 1, "p2p", False, {**MTP, **options})
    (batch,) = _batches(False, 1)
    batch["row"] = torch.arange(LENGTH).expand(BATCH, -1)
    batch, _ = _on_this_rank(batch)
    arguments = batch["tokens"], batch["position_ids"], None
    losses = model(*arguments, labels=batch["labels"], loss_mask=batch["loss_mask"])
    further = float(MTPLossLoggingHelper.tracker["values"][0])
    MTPLossLoggingHelper.clean_loss_in_tracker()
    # Only further tokens have a gradient here; data-parallel ranks are averaged.
    (losses * 0).sum().backward()
    model.finish_grad_sync()
    gradient = model.module.mtp.layers[
        0
    ].transformer_layer.self_attention.linear_qkv.weight.main_grad.clone()
    destroy_groups()
    return batch["row"][0], losses.detach().double(), further, gradient


def _build(spec, cp, tp, pp, comm_type, packed, options):
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        context_parallel_size=cp,
        cp_comm_type=comm_type,
        sequence_parallel=tp > 1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        **options,
    )
    make = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
    layer = gpt_layer_specs.get_gpt_layer_local_spec() if spec == "local" else make()
    stage = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    if config.mtp_num_layers:
        stage["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, True)
    model = GPTModel(config, layer, VOCAB, 64, position_embedding_type="rope", **stage)
    _draw_weights(model, tp, pp)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), [model])
    return model, optimizer


def _draw_weights(model, tp, pp):
    """Give each parameter the values that its name and its tensor-parallel part determine."""
    from megatron.core import parallel_state

    first = parallel_state.get_pipeline_model_parallel_rank() * (LAYERS // pp)
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        parts = local_name(name).split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            parts[at] = str(int(parts[at]) + first)
        seed = sum(ord(char) * (i + 1) for i, char in enumerate(".".join(parts)))
        is_split = getattr(parameter, "tensor_model_parallel", False) and tp > 1
        dim = parameter.partition_dim if is_split else 0
        shape = list(parameter.shape)
        shape[dim] *= tp if is_split else 1
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3
        drawn = drawn + 1.0 if "norm" in name and "weight" in name else drawn
        parameter.data.copy_(drawn.chunk(tp, dim)[rank] if is_split else drawn)


def _batches(packed, steps):
    generator = torch.Generator().manual_seed(7)
    return [_packed(generator) if packed else _dense(generator) for _ in range(steps)]


def _dense(generator):
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(BATCH, -1).contiguous()
    mask = torch.ones(BATCH, LENGTH)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": positions,
        "loss_mask": mask,
    }


def _packed(generator):
    padded = [-(-n // PADDED) * PADDED for n in DOCUMENTS]
    total = sum(padded)
    tokens = torch.randint(VOCAB, (1, total + 1), generator=generator)
    mask = torch.cat([(torch.arange(m) < n).float() for n, m in zip(DOCUMENTS, padded)])
    positions = torch.cat([torch.arange(m) for m in padded])
    bounds = [torch.tensor([0, *n]).cumsum(0).int() for n in (DOCUMENTS, padded)]
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": positions.unsqueeze(0),
        "loss_mask": mask.unsqueeze(0),
        "bounds": bounds,
    }


def _forward_step(iterator, model):
    batch = dict(next(iterator))
    total = batch["loss_mask"].sum()
    batch, params = _on_this_rank(batch)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=params,
    )
    return losses, partial(_loss, batch["loss_mask"], total)


def _on_this_rank(batch):
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.utils import get_batch_on_this_cp_rank

    bounds = batch.pop("bounds", None)
    if bounds is None:
        return get_batch_on_this_cp_rank(batch), None
    import transformer_engine_torch as tex

    size = parallel_state.get_context_parallel_world_size()
    index = tex.thd_get_partitioned_indices(
        bounds[1], batch["tokens"].shape[1], size, parallel_state.get_context_parallel_rank()
    )
    longest = int((bounds[1][1:] - bounds[1][:-1]).max())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds[0],
        cu_seqlens_kv=bounds[0],
        cu_seqlens_q_padded=bounds[1],
        cu_seqlens_kv_padded=bounds[1],
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return {name: x.index_select(1, index) for name, x in batch.items()}, params


def _loss(mask, total, losses):
    loss = (losses * mask).sum() / total
    return loss, {"loss": loss.detach().clone()}


def _whole_loss(found):
    from megatron.core import parallel_state

    if not found:
        return None
    total = torch.stack([one["loss"] for one in found]).mean()
    torch.distributed.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return float(total)
