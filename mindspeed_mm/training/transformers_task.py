"""The five callbacks for models of transformers on data.json: nothing is left to write."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from mindspeed.compat.run_arguments import get_args
from mindspeed.config import ConfigError
from mindspeed_mm.training.callbacks import Callbacks
from mindspeed_mm.training.device_batch import move_to_device

Output = dict[str, torch.Tensor]


def model_provider(pre_process: bool = True, post_process: bool = True) -> nn.Module:
    """Build the model that the model section names."""
    from mindspeed_mm.models.transformers_model import TransformersModel

    args = get_args()
    if args.mm.model is None:
        raise ConfigError("no model: give --mm-model, or a section `model` in the YAML file")
    # The weights of its folder are not needed where others come from --load, or none.
    on_meta = args.init_model_with_meta_device or args.from_scratch or args.load is not None
    untied = args.untie_embeddings_and_output_weights
    return TransformersModel(args.mm.model.for_run(untied=untied, on_meta=on_meta))


def train_valid_test_datasets_provider(
    train_val_test_num_samples: tuple[int | None, int, int],
) -> tuple[Any, Any, None]:
    """Open the records that the data section names."""
    from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset

    args = get_args()
    if args.mm.data is None:
        raise ConfigError("no data: give --mm-data, or a section `data` in the YAML file")
    config = args.mm.data.for_run(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        num_workers=args.num_workers,
        seed=args.seed,
    )
    made = build_mm_dataset(config.dataset_param)
    train, valid = made if isinstance(made, tuple) else (made, None)
    open_loader = partial(build_mm_dataloader, dataset_param=config.dataset_param)
    loader = open_loader(
        train, config.dataloader_param, consumed_samples=args.consumed_train_samples
    )
    if valid is None:
        return loader, None, None
    whole = config.dataloader_param.model_copy(update={"drop_last": False, "shuffle": False})
    return loader, open_loader(valid, whole), None


def get_batch(data_iterator: Iterator[Any]) -> dict[str, Any]:
    """Take the next micro-batch to the device; FSDP2 casts what has to be cast."""
    batch: dict[str, Any] = move_to_device(next(data_iterator))
    return batch


def loss_func(output: Output) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the sum of the losses of a micro-batch, its number of tokens, and what to tell."""
    tokens = output["token_nums"]
    loss = output["loss"] * tokens
    told = {"loss": torch.stack([loss.detach().float(), tokens.float()])}
    if (aux := output.get("aux_loss")) is not None:
        loss = loss + aux * tokens
        told["aux loss"] = aux.detach()
    return loss, tokens, told


def forward_step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Output, Any]:
    """Run the model on the next micro-batch."""
    return model(**get_batch(data_iterator)), loss_func


CALLBACKS = Callbacks(model_provider, train_valid_test_datasets_provider, forward_step)
