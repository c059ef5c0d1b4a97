"""One training step of a GPT of megatron-core, for benchmarks that compare whole steps."""

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

SEQUENCE, BATCH, VOCABULARY = 1024, 4, 32000


def build_step(layers=8, hidden=1024, heads=16):
    """Build model and optimizer on one rank and return the function that trains one step."""
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", world_size=1, rank=0)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
    )
    model = Float16Module(config, model.cuda())
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    settings = OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16)
    optimizer = get_megatron_optimizer(settings, [model])
    batch = _batch()

    def forward_step(iterator, model):
        return model(*batch["inputs"], labels=batch["labels"]), _mean

    def step():
        model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        optimizer.step()

    return step


def _mean(losses):
    loss = losses.float().mean()
    return loss, {"loss": loss.detach()}


def _batch():
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), device="cuda")
    positions = torch.arange(SEQUENCE, device="cuda").expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, device="cuda").triu(1).bool()
    return {"inputs": (tokens[:, :-1], positions, mask), "labels": tokens[:, 1:]}
