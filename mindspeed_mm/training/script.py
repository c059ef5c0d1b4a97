"""`pretrain`: what a script calls with its callbacks."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed.config import ConfigError, printable
from mindspeed.training.checkpoint_dir import TrainState
from mindspeed.training.entry import CONFIG_ERROR, run_rank
from mindspeed_mm.training.arguments import ExtraArguments, Run, Schema, parse
from mindspeed_mm.training.callbacks import Callbacks

logger = logging.getLogger(__name__)


def pretrain(
    train_valid_test_dataset_provider: Callable[..., Any],
    model_provider: Callable[..., Any],
    model_type: Any = None,
    forward_step_func: Callable[..., Any] | None = None,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    *,
    extra_args_provider: ExtraArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    schema: Schema | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Train as one rank of a script, in Megatron's order of arguments; model_type may be left out.

    A configuration error ends the script with one line and exit code 2. `schema` is what
    the model and data sections may hold, where they are not those of TransformersModel.
    """
    if forward_step_func is None:
        model_type, forward_step_func = None, model_type
    if not callable(forward_step_func):
        raise TypeError("pretrain needs a forward_step: pretrain(data, model, forward_step)")
    callbacks = Callbacks(
        model_provider,
        train_valid_test_dataset_provider,
        forward_step_func,
        process_non_loss_data_func,
    )

    def run() -> None:
        parsed = parse(
            argv,
            extra_args_provider=extra_args_provider,
            args_defaults=args_defaults,
            schema=schema,
        )
        train(parsed, callbacks)

    try:
        code = run_rank(run)
    except ConfigError as error:
        sys.stderr.write(f"{sys.argv[0]}: error: {printable(str(error))}\n")
        code = CONFIG_ERROR
    if code:
        raise SystemExit(code)


def train(run: Run, callbacks: Callbacks) -> TrainState:
    """Train as one rank to the last step; Stopped is raised if it is asked to stop before."""
    import mindspeed.megatron_adaptor  # noqa: F401  # before anything of Megatron
    from mindspeed_mm.training.setup import prepare
    from mindspeed_mm.training.trainer import FsdpTrainer

    setup = prepare(run, callbacks)
    try:
        return FsdpTrainer(setup, callbacks).train()
    except ConfigError as error:
        if setup.args.local_rank:  # what is wrong with data may be seen by one rank only
            logger.error("rank %d: %s", setup.dims.rank, error)
        raise
    finally:
        if setup.save_dir_lock is not None:
            setup.save_dir_lock.release()
