"""Small trainings of mindspeed_mm in one rank on the device at hand, each in its own folder."""

import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from mindspeed import device
from mindspeed_mm.checkpoint import ConvertOptions
from mindspeed_mm.checkpoint.conversion import convert
from mindspeed_mm.training import get_args, move_to_device
from mindspeed_mm.training.callbacks import Callbacks
from tests.distributed.fsdp_model import Transformer
from tests.mm import runs, tiny

NAME, HALF, STEPS = "qwen2_5_vl", 3, 5
TEXT, EYES = "model.language_model.layers.{*}", "model.visual.blocks.{*}"
SHARDED = {"sharding_size": "auto", "sub_modules_to_wrap": [TEXT, EYES]}
AGAIN = {"recompute_modules": [TEXT]}
OFFLOADED = {"offload_to_cpu": True, "pin_memory": True}
META = {"init_model_with_meta_device": True}
BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # What the FSDP2 options and the flags add; all are to give the losses of a plain loop.
    "plain": ({}, {}),
    "meta": ({"num_to_forward_prefetch": 1, "num_to_backward_prefetch": 2}, META),
    "recompute": (AGAIN, {}),
    "recompute non-reentrant": (AGAIN | {"use_reentrant": False}, {}),
    "offload": (OFFLOADED, {}),
    "offload from meta": (OFFLOADED | {"reshard_after_forward": False}, META),
}


def run_all(folder: str) -> None:
    """Train every case; what it gave is in the checkpoint and the log of its folder."""
    root, here = Path(folder), device.current()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False  # the pictures go through a convolution
    host = device.known()["cpu"]
    backend = ",".join(dict.fromkeys(f"{d.name}:{d.backend}" for d in (here, host)))
    torch.distributed.init_process_group(backend)
    model = tiny.save(NAME, root / "model")
    for name, (fsdp, flags) in SAME.items():
        _train(root / name, model, fsdp, flags)
    _train(root / "bf16", model, BF16, {})
    _train(root / "half", model, {}, {"train_iters": HALF, "async_save": True, "save_interval": 1})
    _train(root / "resumed", model, {}, {"load": str(root / "half")})
    if _has_peft():
        lora = {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}
        _train(root / "lora", model, BF16, {"lr": 1e-2}, lora)
    _convert(root, model)
    _user_models(root)
    print(here.name, max(_gradient_differences()), *_device_bytes())
    torch.distributed.destroy_process_group()


def _train(
    folder: Path,
    model: str,
    fsdp: dict[str, Any],
    flags: dict[str, Any],
    section: dict[str, Any] | None = None,
) -> None:
    flags = runs.options(folder, **{"train_iters": STEPS} | flags)
    run = runs.make_run(flags, SHARDED | fsdp, {"init_from_hf_path": model} | (section or {}))
    runs.train_once(run, runs.tiny_callbacks(NAME))


def _convert(root: Path, model: str) -> None:
    """Train from converted weights, and convert what was trained."""
    there = ConvertOptions(load_dir=model, save_dir=str(root / "dcp"))
    back = ConvertOptions(
        load_dir=str(root / "plain"), save_dir=str(root / "hf"), model_assets_dir=model
    )
    for options in (there, back):
        convert(options)
    _train(root / "converted", model, {}, META | {"load": str(root / "dcp")})


def _user_models(root: Path) -> None:
    """Train a module without mixins, offloaded from the meta device, that tells plain numbers."""
    plain = runs.user_callbacks()

    def loaders() -> Any:
        return DataLoader(runs.UserData(), get_args().micro_batch_size, pin_memory=True), None, None

    def tell(loss_func: Any, output: Any) -> Any:
        loss = loss_func(output)
        return loss, {"loss": (2 * loss.detach(), 2), "one": 1.0, "pair": (3, 2)}

    def step(batches: Any, model: Any) -> Any:
        output, loss_func = plain.forward_step(batches, model)
        return output, partial(tell, loss_func)

    callbacks = Callbacks(Transformer, loaders, step)
    flags = META | {"from_scratch": True, "train_iters": 2}
    fsdp = {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"]} | OFFLOADED
    run = runs.make_run(runs.options(root / "user", **flags), fsdp)
    runs.train_once(run, callbacks)


def _device_bytes() -> list[int]:
    """Return what a model of 32 MiB takes of the device, sharded and then also offloaded."""
    from mindspeed.config import build
    from mindspeed.fsdp import FsdpOptions, shard

    found = []
    for more in ({}, OFFLOADED):
        gc.collect()  # models of before are not to go in between
        before = device.current().memory_allocated()
        layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)))
        shard(layers, build(FsdpOptions, {"sub_modules_to_wrap": ["{*}"]} | more))
        layers(move_to_device(torch.ones(1, 1024))).sum().backward()
        found.append(device.current().memory_allocated() - before)
        del layers
    return found


def _gradient_differences() -> list[float]:
    """Return how far gradients behind recomputed dropout are from those of the plain forward."""
    from mindspeed.fsdp.recompute import recompute
    from tests.unit.fsdp.test_recompute import Block

    found = []
    for how in (None, True, False):
        torch.manual_seed(0)
        block = Block().to(device.current().torch_device)
        if how is not None:
            recompute(block, use_reentrant=how)
        x = move_to_device(torch.randn(64, 3)).requires_grad_()
        block(x=x, scale=x, pair=(x, x))["y"].square().sum().backward()
        found.append(x.grad)
    return [float((gradient - found[0]).abs().max()) for gradient in found[1:]]


def _has_peft() -> bool:
    try:
        import peft  # noqa: F401
    except ImportError:
        return False
    return True
