"""What adapters a run trains: which projections get one, and of what rank."""

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.checkpoint.detection import ADAPTER_CONFIG, TRACKER, read_adapter_config
from mindspeed.config import ConfigError, Spelling, did_you_mean
from mindspeed_llm.checkpoint.adapters import WEIGHTS, peft_names
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.registry import family_named
from mindspeed_llm.models.weight_table import Weight
from mindspeed_llm.training.options import LORA_TARGETS, TrainOptions

logger = logging.getLogger(__name__)

ADAPTER_FIELDS = ("lora_alpha", "lora_dropout", "lora_target_modules", "lora_train_router")
UNSUPPORTED = ("use_rslora", "use_dora", "alpha_pattern", "rank_pattern", "fan_in_fan_out")
"""Keys of peft's config that change what adapters add."""


@dataclass(frozen=True)
class LoraPlan:
    """Which projections get adapters, and of what kind."""

    r: int
    alpha: float
    dropout: float
    modules: tuple[str, ...]
    """Last parts of their HF names, such as q_proj."""
    base: str | None
    routers: tuple[str, ...] = ()
    """Last parts of the HF names of routers that are trained, whole, beside the adapters."""

    def as_peft(self) -> dict[str, Any]:
        """Return what peft's adapter_config.json says."""
        whole = {"modules_to_save": list(self.routers)} if self.routers else {}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.r,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": list(self.modules),
            "bias": "none",
            "inference_mode": True,
            **whole,
        }


def plan_lora(options: TrainOptions, shape: ModelConfig) -> LoraPlan | None:
    """Return the plan if adapters are asked for; raise if the model cannot have them."""
    if options.lora_r is None and options.lora_load is None:
        return None
    rank = 16 if options.lora_r is None else options.lora_r
    if rank < 1 or options.lora_alpha <= 0 or not 0 <= options.lora_dropout < 1:
        raise ConfigError(
            f"--lora-r {rank} --lora-alpha {options.lora_alpha:g} --lora-dropout "
            f"{options.lora_dropout:g}: give a rank and an alpha above 0, and a share below 1"
        )
    if options.lora_load is not None:
        _check_loaded(Path(options.lora_load), rank, options.lora_alpha)
    weights = adaptable_weights(shape)
    parts = {weight.name.split(".")[-2]: projection_names(weight) for weight in weights}
    known = [*parts, *(name for names in parts.values() for name in names)]
    modules: set[str] = set()
    for target in _targets(options, parts, shape.family):
        if target not in known:
            raise ConfigError(
                f"--lora-target-modules {target}: this {shape.family} model has no such layer for "
                f"adapters; {did_you_mean(target, known)}"
            )
        modules |= set(parts.get(target, [target]))
    if not modules:
        raise ConfigError(f"--lora-target-modules is empty: choose from {', '.join(known)}")
    if any(w.expert is not None and modules & set(projection_names(w)) for w in weights):
        _check_experts(options)
    if options.lora_load is not None:
        _check_all_used(options.lora_load, modules, weights)
    return LoraPlan(
        rank,
        options.lora_alpha,
        options.lora_dropout,
        tuple(sorted(modules)),
        options.load,
        _trained_routers(options, shape),
    )


def check_has_no_adapters(options: TrainOptions) -> None:
    """Refuse what describes adapters where a forgotten switch would train all weights instead."""
    for name in ADAPTER_FIELDS:
        if getattr(options, name) != type(options).model_fields[name].default:
            raise ConfigError(
                f"{Spelling.FLAG.name_of(name)}: without --lora-r or --lora-load there are no "
                "adapters, and all weights would be trained: add one of them, or drop it"
            )


def _targets(options: TrainOptions, parts: Mapping[str, Any], family: str) -> Sequence[str]:
    """Return the layers that the options name; the default is those that the model has."""
    if options.lora_target_modules != LORA_TARGETS:
        return options.lora_target_modules
    missing = [target for target in LORA_TARGETS if target not in parts]
    if missing and parts:
        logger.warning(
            "adapters in %s: this %s model has none for %s",
            " ".join(target for target in LORA_TARGETS if target in parts),
            family,
            " ".join(missing),
        )
    return [target for target in LORA_TARGETS if target in parts]


def _check_experts(options: TrainOptions) -> None:
    """Refuse adapters of experts where these are no grouped linear layers."""
    without = "or leave experts out of --lora-target-modules (linear_qkv linear_proj)"
    if options.transformer_impl == "local":
        raise ConfigError(
            "adapters of experts need --transformer-impl transformer_engine, not local: change "
            f"it, {without}"
        )
    if not options.moe_grouped_gemm:
        raise ConfigError(
            f"adapters of experts need grouped GEMMs: drop --no-moe-grouped-gemm, {without}"
        )
    if options.lora_dropout:
        raise ConfigError(
            f"--lora-dropout {options.lora_dropout:g}: adapters of experts have no dropout, as in "
            f"peft: use 0, {without}"
        )


def _trained_routers(options: TrainOptions, shape: ModelConfig) -> tuple[str, ...]:
    """Return the HF modules of routers if these are trained beside adapters."""
    if not options.lora_train_router:
        return ()
    if shape.moe is None:
        raise ConfigError("--lora-train-router: the model has no experts: drop it")
    if options.freeze_router:
        raise ConfigError("--lora-train-router and --freeze-router exclude each other: drop one")
    table = family_named(shape.family).table
    routers = [rule.hf[0] for rule in table.moe if rule.mcore == "mlp.router.weight"]
    return tuple(name.split(".")[-2] for name in routers)


def _check_loaded(folder: Path, rank: int, alpha: float) -> None:
    """Refuse what are no adapters of peft, or add something else than this run would."""
    if not (folder / WEIGHTS).is_file():
        advice = "give a folder of peft"
        if (folder / TRACKER).is_file():
            advice = (
                "it is a training checkpoint: write its adapters with mindspeed-llm export-lora "
                f"{folder} DIR, and give DIR"
            )
        raise ConfigError(f"--lora-load {folder}: there is no {WEIGHTS} in it: {advice}")
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    config = read_adapter_config(folder)
    for key, flag, given in (("r", "--lora-r", rank), ("lora_alpha", "--lora-alpha", alpha)):
        if config[key] != given:
            raise ConfigError(
                f"{flag} {given:g}: the adapters in --lora-load {folder} have {config[key]}: give "
                f"{flag} {config[key]}"
            )
    for key in UNSUPPORTED:
        if config.get(key):
            raise ConfigError(
                f"--lora-load {folder}: {ADAPTER_CONFIG} has {key} {config[key]}, "
                "which is not supported"
            )


def _check_all_used(folder: str, modules: Set[str], weights: Sequence[Weight]) -> None:
    """Refuse loaded weights that this run would not train: it would go on without them."""
    names = {name for weight in weights for name in projections(weight)}
    expected = {name for name in names if name.rpartition(".")[2] in modules}
    for name in peft_names(folder):
        layer, _, factor = name.partition(".lora_")
        if factor not in ("A.weight", "B.weight"):
            raise ConfigError(
                f"--lora-load {folder}: has {name}, and only adapters of linear layers are loaded: "
                "merge it into the model (export-lora --merge, or merge_and_unload of peft) and "
                "--load that"
            )
        if layer not in expected:
            part = layer.rpartition(".")[2]
            advice = f"add {part} to it" if layer in names else "it is of another model"
            raise ConfigError(
                f"--lora-load {folder}: has an adapter for {layer}, which --lora-target-modules "
                f"does not name: {advice}"
            )


def check_same(plan: LoraPlan | None, saved: Mapping[str, Any]) -> None:
    """Raise if a run would resume with other adapters than it was saved with."""
    now = plan.as_peft() if plan is not None else {}
    advice = "choose another --save, or start from that checkpoint with --finetune"
    for key, flag in (
        ("r", "--lora-r"),
        ("lora_alpha", "--lora-alpha"),
        ("target_modules", "--lora-target-modules"),
    ):
        if now.get(key) != saved.get(key):
            raise ConfigError(
                f"{flag} {now.get(key, 'is not given')}: the checkpoint to resume from has "
                f"{saved.get(key, 'no adapters')}: {advice}"
            )
    if now.get("modules_to_save") != saved.get("modules_to_save"):
        given, was = ("", "without") if "modules_to_save" in now else (" is not given", "with")
        raise ConfigError(
            f"--lora-train-router{given}: the checkpoint to resume from was trained {was} it: "
            f"{advice}"
        )


def adaptable_weights(shape: ModelConfig) -> list[Weight]:
    """Return the matrices that adapters are made for.

    In a mixture of experts these are attention and the routed experts: peft, too, has no adapters
    for dense layers and shared experts beside them, whose projections have the names of experts'.
    """
    found = [
        weight
        for weight in family_named(shape.family).table.weights(shape)
        if weight.name.startswith("decoder.")
        and weight.name.endswith(tuple(f".{target}.weight" for target in LORA_TARGETS))
        and ".shared_experts." not in weight.name
        and len(weight.slice_maps[0].hf_slice) == 2  # not of all experts in one tensor
    ]
    if shape.moe is not None:
        found = [w for w in found if ".self_attention." in w.name or w.expert is not None]
    return found


def projection_names(weight: Weight) -> list[str]:
    """Return the HF projections of a layer, by the last part of their names."""
    return [name.rpartition(".")[2] for name in projections(weight)]


def projections(weight: Weight) -> dict[str, tuple[int, int]]:
    """Return the HF projections that make up a weight, with rows and columns."""
    sizes: dict[str, tuple[int, int]] = {}
    for m in weight.slice_maps:
        name = m.hf_name.removesuffix(".weight")
        rows, columns = sizes.get(name, (0, 0))
        sizes[name] = (max(rows, m.hf_slice[0][1]), max(columns, m.hf_slice[1][1]))
    return sizes
