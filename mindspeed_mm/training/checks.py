"""What can never work is refused here, before ranks meet or a model is built."""

from mindspeed import device
from mindspeed.checkpoint.detection import detect
from mindspeed.config import ConfigError, Spelling, did_you_mean
from mindspeed.distributed import environment
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed.fsdp import FsdpOptions
from mindspeed.training.options import check_run
from mindspeed_mm.training.options import INSTEAD, MmOptions

DCP = "torch_dist"
"""What `detect` calls a folder that torch.distributed.checkpoint wrote."""


def check(options: MmOptions, fsdp: FsdpOptions) -> None:
    """Refuse what can never work; ConfigError says what to do."""
    check_run(options)
    _check_refused(options)
    for key in ("param_dtype", "reduce_dtype", "output_dtype"):
        if getattr(fsdp, key) == "fp16":
            raise ConfigError(f"{key}: fp16: {INSTEAD['fp16'].replace('--bf16, or ', '')}")
    world = environment.world_size()
    fsdp.mesh_shape(world)
    ParallelDims(world=world, cp=options.context_parallel_size)
    _check_backend(options.distributed_backend)
    if fsdp.offload_to_cpu and not reaches_host(options.distributed_backend):
        here = device.current()
        host = device.known()["cpu"].backend
        raise ConfigError(
            "offload_to_cpu: true needs ranks that also talk from host memory: give "
            f"--distributed-backend {here.name}:{here.backend},cpu:{host}"
        )
    if options.load is not None:
        _check_load(options.load)


def reaches_host(backend: str | None) -> bool:
    """Say whether ranks will be able to talk from host memory."""
    return device.current().name == "cpu" or "cpu:" in (backend or "")


def _check_backend(given: str | None) -> None:
    """Refuse names that nobody has; those of other devices stand in scripts that moved here."""
    known = [(each.name, each.backend) for each in device.known().values()]
    names = {backend for _, backend in known} | {f"{name}:{backend}" for name, backend in known}
    for word in given.split(",") if given else ():
        if word.strip() not in names:
            raise ConfigError(
                f"--distributed-backend {given}: {word} is not known; {did_you_mean(word, names)}"
            )


def _check_refused(options: MmOptions) -> None:
    for name, instead in INSTEAD.items():
        value = getattr(options, name)
        if value != type(options).model_fields[name].default:
            raise ConfigError(f"{Spelling.FLAG.with_value(name, value)}: {instead}")


def _check_load(load: str) -> None:
    try:
        found = detect(load)
    except ConfigError as error:
        raise ConfigError(f"--load {error}") from None
    if found.kind not in (DCP, "hf"):
        raise ConfigError(
            f"--load {load}: holds Megatron's rank files: give a Hugging Face folder, or a "
            "checkpoint of this suite (mindspeed-mm convert makes one)"
        )
