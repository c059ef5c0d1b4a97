"""A first training loop on megatron-core: build a GPT, look at it, train it, save it, load it.

    python examples/first_training_loop/train.py
    torchrun --nproc-per-node 2 examples/first_training_loop/train.py --tensor-model-parallel-size 2

The line `import mindspeed.megatron_adaptor` is all that makes it run on a laptop, a GPU or an NPU.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch

import mindspeed.megatron_adaptor  # noqa: F401  # isort: skip
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from megatron.training import get_model
from megatron.training.tokenizer.tokenizer import _NullTokenizer
from torch.utils.data import DataLoader

from mindspeed.config import ConfigError
from mindspeed.distributed.parallel_dims import ParallelDims, check_model

_SEQUENCE_LENGTH = 64
_MICRO_BATCH_SIZE = 8
_VOCABULARY = 100


def initialize_distributed(tensor_model_parallel_size=1, pipeline_model_parallel_size=1):
    """Join the other ranks, then cut the world into tensor, pipeline and data parallel groups."""
    parallel_state.destroy_model_parallel()
    rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(rank)
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.distributed.init_process_group(
        world_size=world,
        rank=int(os.environ.get("RANK", 0)),
        store=torch.distributed.HashStore() if world == 1 else None,  # plain python is one rank
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size, pipeline_model_parallel_size
    )


def model_provider(pre_process=True, post_process=True, params_dtype=torch.float16):
    """Describe the transformer in a config, then build the GPT around it."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.bfloat16,
        params_dtype=params_dtype,  # the type parameters are created in
        bf16=True,  # the type get_model casts them to
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=_VOCABULARY,
        max_sequence_length=_SEQUENCE_LENGTH,
        pre_process=pre_process,
        post_process=post_process,
    )


def print_parameters(model):
    """List every parameter of this rank with its shape, type and device."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        print(f"{name}, {list(parameter.shape)}, {parameter.dtype}, {parameter.device}")
    print("\nSummary:")
    print(f"Unique dtypes in model: { {p.dtype for p in parameters.values()} }")
    print(f"Unique devices in model: { {p.device for p in parameters.values()} }")
    print(f"Total parameters: {sum(p.numel() for p in parameters.values())}")


def get_train_data_iterator():
    """Iterate over random tokens; ranks of one model replica must see the same ones."""
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=_SEQUENCE_LENGTH,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=_NullTokenizer(vocab_size=_SEQUENCE_LENGTH),
    )
    datasets = BlendedMegatronDatasetBuilder(
        MockGPTDataset, [1000, None, None], lambda: True, config
    ).build()
    order = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    return iter(
        DataLoader(datasets[0], batch_size=_MICRO_BATCH_SIZE, shuffle=True, generator=order)
    )


def forward_step_func(data_iterator, model):
    """Run the model on one micro-batch and say how its output becomes a loss."""

    def loss_func(loss_mask, output_tensor):
        # The model returns the loss of every token, (batch, sequence); what counts is their mean.
        losses = output_tensor.float()
        mask = loss_mask.view(-1).float()
        loss = torch.sum(losses.view(-1) * mask) / mask.sum()
        return loss, {"lm loss": loss.item(), "losses per token": list(losses.shape)}

    batch = {name: tensor.to("cuda") for name, tensor in next(data_iterator).items()}
    for name in ("tokens", "labels"):  # mock data of older releases counts beyond any vocabulary
        batch[name] %= _VOCABULARY
    output_tensor = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output_tensor, partial(loss_func, batch["loss_mask"])


def train(model, optimizer, iterations):
    """Run the loop; Megatron's schedule does the forward and backward passes and their messages."""
    forward_backward_func = get_forward_backward_func()
    train_iterator = get_train_data_iterator()
    for iteration in range(iterations):
        say(f"Starting iteration {iteration + 1}/{iterations}...")
        model.zero_grad_buffer()
        losses_reduced = forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=train_iterator,
            model=model,
            num_microbatches=1,
            seq_length=_SEQUENCE_LENGTH,
            micro_batch_size=_MICRO_BATCH_SIZE,
            decoder_seq_length=_SEQUENCE_LENGTH,
            forward_only=False,
        )
        optimizer.step()
        say(f"Forward-backward pass completed with losses: {from_last_stage(losses_reduced)}")


def from_last_stage(losses_reduced):
    """Tell every stage what only the last one knows."""
    message = [losses_reduced]
    torch.distributed.broadcast_object_list(
        message,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return message[0]


def save_distributed_checkpoint(path, model):
    """Write one checkpoint that any other parallel layout can load."""
    path.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(model.sharded_state_dict(prefix=""), str(path))


def load_distributed_checkpoint(path, model):
    """Read what this rank needs of a checkpoint."""
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(prefix=""), str(path)))


def say(text):
    """Print once, not once a rank."""
    if torch.distributed.get_rank() == 0:
        print(text, flush=True)


def main():
    """Look at the model, then train, save and load it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--checkpoint-path", type=Path, default=Path("ckpt"))
    args = parser.parse_args()
    sizes = {
        "world": int(os.environ.get("WORLD_SIZE", 1)),
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
    }
    check_model(**sizes, num_attention_heads=4, num_layers=2)
    ParallelDims(**sizes)
    initialize_distributed(args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    model_parallel_cuda_manual_seed(123)

    # A bare GPTModel: its parameters have params_dtype, except norms and positions; bf16 is unused.
    stage = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    if torch.distributed.get_rank() == 0:
        print("Creating GPT model...")
        gpt_model = model_provider(**stage)
        print(gpt_model)
        print("GPT model created.")
        print_parameters(gpt_model)

    # get_model reads bf16: it casts every parameter and wraps the model for data parallelism.
    [model] = get_model(model_provider)
    say(f"get_model made every parameter { {str(p.dtype) for p in model.parameters()} }")
    get_model_config(model).finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16), [model]
    )
    train(model, optimizer, args.iterations)

    save_distributed_checkpoint(args.checkpoint_path, model.module.module)
    load_distributed_checkpoint(args.checkpoint_path, model.module.module)
    say(f"Saved to {args.checkpoint_path} and loaded back.")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
