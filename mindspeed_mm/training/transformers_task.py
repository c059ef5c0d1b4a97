"""The callbacks for models of transformers on data.json: a user writes none."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from mindspeed.compat.stand_ins.megatron_training.global_vars import get_args
from mindspeed.config import ConfigError
from mindspeed_mm.training.callbacks import Callbacks, NumSamples, move_to_device
from mindspeed_mm.transformers_errors import is_transformers_error, with_location

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


class Task:
    """The model and the data of one run; records are checked before weights take their time."""

    def __init__(self) -> None:
        self._made: Any = None
        self._has_run = False

    def model(self) -> nn.Module:
        """Open the records, then build the model."""
        from mindspeed_mm.data import build_mm_dataset

        if get_args().mm.data is not None:
            with torch.random.fork_rng(devices=[]):  # the model draws as it does without data
                self._made = build_mm_dataset(_data_config().dataset_param)
        return model_provider()

    def loaders(self, train_val_test_num_samples: NumSamples) -> tuple[Any, Any, None]:
        """Return the loaders of the records that the data section names."""
        from mindspeed_mm.data import build_mm_dataloader

        config = _data_config()
        train, valid = self._made if isinstance(self._made, tuple) else (self._made, None)
        open_loader = partial(build_mm_dataloader, dataset_param=config.dataset_param)
        consumed = get_args().consumed_train_samples
        loader = open_loader(train, config.dataloader_param, consumed_samples=consumed)
        if valid is None:
            return loader, None, None
        whole = config.dataloader_param.model_copy(update={"drop_last": False, "shuffle": False})
        return loader, open_loader(valid, whole), None

    def forward_step(
        self, data_iterator: Iterator[Any], model: nn.Module
    ) -> tuple[Output, Callable[..., Any]]:
        """Run the model; an error on the first micro-batch means that its folders do not match."""
        if self._has_run:
            return forward_step(data_iterator, model)
        batch = get_batch(data_iterator)
        try:
            output = model(**batch)
        except Exception as error:
            if not is_transformers_error(error):
                raise
            raise ConfigError(_misfit(error)) from error
        self._has_run = True
        return output, loss_func


def _misfit(error: Exception) -> str:
    sections = get_args().mm
    model = sections.model.init_from_hf_path
    processor = sections.data.dataset_param.preprocess_parameters.model_name_or_path
    return (
        f"the model of {model} cannot compute the first batch that the processor of {processor} "
        f"makes: {with_location(error)}; the files of both have to be of one model and undamaged"
    )


def _data_config() -> Any:
    args = get_args()
    if args.mm.data is None:
        raise ConfigError("no data: give --mm-data, or a section `data` in the YAML file")
    return args.mm.data.for_run(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        num_workers=args.num_workers,
        seed=args.seed,
    )


def get_batch(data_iterator: Iterator[Any]) -> dict[str, Any]:
    """Take the next micro-batch to the device; FSDP2 casts what has to be cast."""
    batch: dict[str, Any] = move_to_device(next(data_iterator))
    return batch


def loss_func(output: Output) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the sum of the losses of a micro-batch, its number of tokens, and its metrics."""
    tokens = output["token_nums"]
    loss = output["loss"] * tokens
    metrics = {"loss": torch.stack([loss.detach().float(), tokens.float()])}
    if (aux := output.get("aux_loss")) is not None:
        loss = loss + aux * tokens
        metrics["aux loss"] = aux.detach()
    return loss, tokens, metrics


def forward_step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Output, Any]:
    """Run the model on the next micro-batch."""
    return model(**get_batch(data_iterator)), loss_func


def callbacks() -> Callbacks:
    """Return the callbacks of one run."""
    task = Task()
    return Callbacks(task.model, task.loaders, task.forward_step)
