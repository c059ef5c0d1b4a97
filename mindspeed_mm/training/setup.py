"""Everything a run needs, made once: the sharded model, its weights, its optimizer."""

import argparse
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed import device
from mindspeed.checkpoint.detection import detect
from mindspeed.checkpoint.digests import verify
from mindspeed.compat.stand_ins.megatron_training.global_vars import set_args
from mindspeed.config import ConfigError
from mindspeed.distributed import environment
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed.distributed.process_groups import (
    init_distributed,
    init_model_parallel,
    set_collective_timeout,
)
from mindspeed.distributed.seeds import seed_everything
from mindspeed.fsdp import shard
from mindspeed.fsdp.plan import DTYPES
from mindspeed.training.checkpoint_dir import TrainState, agree_on_resume, resume, verify_state
from mindspeed.training.save_dir_lock import SaveDirLock, release_on_error
from mindspeed_mm.models import meta_device, weights
from mindspeed_mm.models.options import LoraConfig
from mindspeed_mm.training.arguments import Run, reaches_host
from mindspeed_mm.training.callbacks import Callbacks
from mindspeed_mm.training.checkpoint import FsdpCheckpoints
from mindspeed_mm.training.optimizer import make_optimizer
from mindspeed_mm.training.options import MmOptions

logger = logging.getLogger(__name__)


@dataclass
class Setup:
    """What a run is, and what it trains."""

    run: Run
    args: argparse.Namespace
    dims: ParallelDims
    save_dir_lock: SaveDirLock | None
    """The first rank's lock on --save."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    checkpoints: FsdpCheckpoints
    state: TrainState

    @property
    def is_per_token(self) -> bool:
        """Whether the loss is the mean over the tokens of a step."""
        loss = getattr(self.run.mm.model, "loss_cfg", None)
        is_asked = getattr(loss, "loss_type", None) == "per_token_loss"
        return is_asked or self.run.options.calculate_per_token_loss


def prepare(run: Run, callbacks: Callbacks) -> Setup:
    """Init the process groups, build the model and fill it."""
    options = run.options
    dims = parallel_dims(options)
    save_dir_lock = SaveDirLock(options.save) if options.save and dims.rank == 0 else None
    with release_on_error(save_dir_lock):
        return _begin_with(run, callbacks, dims, save_dir_lock)


def _begin_with(
    run: Run, callbacks: Callbacks, dims: ParallelDims, save_dir_lock: SaveDirLock | None
) -> Setup:
    options = run.options
    _init_process_groups(options, dims)
    args = make_args(run, dims)
    set_args(args)
    resumed = agree_on_resume(options)
    if resumed is not None:
        verify_state(resumed, options)
    model = _build(run, callbacks, dims)
    _fill(model, run, resumed)
    model.train()
    optimizer = make_optimizer(model, options)
    checkpoints = FsdpCheckpoints(
        options.save, model, optimizer, timeout_minutes=options.distributed_timeout_minutes
    )
    state = _load_state(run, checkpoints, resumed)
    set_collective_timeout(options.distributed_timeout_minutes)  # also groups made by sharding
    args.iteration, args.consumed_train_samples = state.iteration, state.consumed_samples
    return Setup(run, args, dims, save_dir_lock, model, optimizer, checkpoints, state=state)


def parallel_dims(options: MmOptions) -> ParallelDims:
    """Work out how the ranks share the batch; neighbours share a sequence."""
    return ParallelDims(
        world=environment.world_size(),
        rank=environment.rank(),
        cp=options.context_parallel_size,
        micro_batch_size=options.micro_batch_size,
        # None: one micro-batch of every data-parallel rank
        global_batch_size=options.global_batch_size,  # type: ignore[arg-type]
    )


def _init_process_groups(options: MmOptions, dims: ParallelDims) -> None:
    """Init the default group and Megatron's, which callbacks may ask for."""
    here, backend = device.current(), None
    if here.name != "cpu" and reaches_host(options.distributed_backend):
        backend = f"{here.name}:{here.backend},cpu:{device.known()['cpu'].backend}"
    timeout = options.distributed_timeout_minutes
    init_distributed(here, timeout_minutes=timeout, backend=backend)
    init_model_parallel(dims, timeout_minutes=timeout)


def adapters(run: Run) -> dict[str, Any]:
    """Return the adapters of the model section, as checkpoints store them; empty without."""
    lora = getattr(run.mm.model, "lora", None)
    return lora.as_peft() if isinstance(lora, LoraConfig) else {}


def _check_same_alpha(now: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise for another alpha than the run had; adapters of another rank or layer do not fit."""
    key = "lora_alpha"
    if saved and now.get(key) != saved.get(key):
        raise ConfigError(
            f"lora: alpha: {now.get(key)}: the run to resume has {saved.get(key)}: give that, "
            "or start from that checkpoint with --finetune and another --save"
        )


def make_args(run: Run, dims: ParallelDims) -> argparse.Namespace:
    """Return what callbacks get from get_args(): all options, and what follows from them."""
    dtype = DTYPES.get(run.fsdp.param_dtype or "", torch.float32)
    return argparse.Namespace(
        **dict(run.options)
        | run.extra
        | {
            "mm": run.mm,
            "fsdp2": run.fsdp,
            "params_dtype": dtype,
            "rank": dims.rank,
            "world_size": dims.world,
            "local_rank": environment.local_rank(),
            "data_parallel_size": dims.dp,
            "global_batch_size": dims.global_batch_size,
            "iteration": 0,
            "consumed_train_samples": 0,
        }
    )


def _build(run: Run, callbacks: Callbacks, dims: ParallelDims) -> nn.Module:
    """Build the model alike on every rank, and shard it."""
    seed_everything(run.options.seed)
    is_meta = run.options.init_model_with_meta_device
    source = None if is_meta else getattr(run.mm.model, "init_from_hf_path", None)
    _verify_hf(source, run)
    with meta_device.meta_parameters() if is_meta else nullcontext():
        model = callbacks.model()
    if dims.cp > 1:
        _share_sequences(model, dims.cp)
    shard_itself: Any = getattr(model, "fully_shard", None)
    if shard_itself is None or not shard_itself(fsdp2_config=run.fsdp):
        shard(model, run.fsdp)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    loose = [name for name, p in trained.items() if not isinstance(p, DTensor)]
    if loose and dims.world > 1:
        raise ConfigError(
            f"{loose[0]} is trained but not sharded, so nothing would bring its gradients "
            "together: shard the module around it in _fully_shard, or freeze it"
        )
    return model


def _share_sequences(model: Any, size: int) -> None:
    from megatron.core import parallel_state

    if not hasattr(model, "set_context_parallel_group"):
        raise ConfigError(
            f"--context-parallel-size {size}: {type(model).__name__} has no method "
            "set_context_parallel_group(group), which TransformersModel has: write it, or use 1"
        )
    model.set_context_parallel_group(parallel_state.get_context_parallel_group())


def _fill(model: nn.Module, run: Run, resumed: Path | None) -> None:
    """Give memory to a model that has none, and weights that come from a Hugging Face folder."""
    is_empty = any(p.device.type == "meta" for p in model.parameters())
    if is_empty:
        weights.materialize(model, offload=run.fsdp.offload_to_cpu)
    if resumed is not None:
        return
    load = run.options.load
    source = None if load is None or detect(load).kind != "hf" else load
    if is_empty and load is None:
        source = getattr(run.mm.model, "init_from_hf_path", None)
        if run.options.from_scratch:
            meta_device.initialize(model)
            return
        if source is None:
            raise ConfigError(
                "--init-model-with-meta-device: no weights to begin with: give --load or "
                "init_from_hf_path of the model, or --from-scratch for random ones"
            )
    if source is not None:
        _verify_hf(source, run)
        weights.load_pretrained(model, source)
        logger.info("weights from %s", source)


def _verify_hf(source: str | None, run: Run) -> None:
    """Verify a Hugging Face folder before all ranks read it, if it came with digests."""
    if source is not None:
        is_wanted = not run.options.no_verify
        verify(Path(source), enabled=is_wanted, is_shared=True, is_expected=False)


def _load_state(run: Run, checkpoints: FsdpCheckpoints, resumed: Path | None) -> TrainState:
    """Resume from a training checkpoint, or start with the weights of one."""
    options = run.options
    if resumed is not None:
        state = resume(checkpoints, resumed, options)
        _check_same_alpha(adapters(run), state.lora)
        return state
    if options.load is not None and (found := detect(options.load)).kind != "hf":
        checkpoints.load(found.folder, with_optimizer=False, verify=not options.no_verify)
        logger.info("weights from %s", found.folder)
    return TrainState()
