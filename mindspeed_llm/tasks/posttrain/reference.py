"""The frozen reference of a stage: a second model, or the policy without its adapters."""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mindspeed import device
from mindspeed.checkpoint.detection import CheckpointDir, detect
from mindspeed.config import ConfigError
from mindspeed.device.side_stream import SideStream
from mindspeed.training.checkpoint_dir import find_resume
from mindspeed_llm.checkpoint.loading import config_folder, open_source
from mindspeed_llm.losses.log_probs import sequence_log_probs
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.tasks.posttrain.base import BaseTrainer, Batch
from mindspeed_llm.training.lora import without_adapters
from mindspeed_llm.training.model import ModelRole, RoleModel

logger = logging.getLogger(__name__)

REFERENCE = "reference_log_probs"
"""Where a micro-batch has the reference's log-probability of every sequence."""


NOT_COMPARED = ("max_position_embeddings", "moe.aux_loss_coeff", "mtp_num_layers")
"""What a reference may have another value of: it changes no log-probability."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".distcp")
SAMPLES, SAMPLE_BYTES = 64, 4096


def digest_of_samples(weights: CheckpointDir) -> str:
    """Digest names, sizes and samples of the files with weights.

    Other weights of the same shapes, say with merged adapters, differ in nearly every sample;
    reading all of a large model would take minutes.
    """
    digest = hashlib.sha256()
    pattern = "*" if weights.kind == "hf" else "**/*"
    for path in sorted(weights.folder.glob(pattern)):
        if path.suffix not in WEIGHT_FILES:
            continue
        size = path.stat().st_size
        digest.update(f"{path.relative_to(weights.folder)} {size}\n".encode())
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(size * number // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


class ReferenceTrainer(BaseTrainer):
    """Trains a policy, and knows what the reference says about a micro-batch."""

    def initialize(self) -> None:
        """Build the models, and log what the reference is where it is none of them."""
        super().initialize()
        if self.needs_reference and self.is_own_reference:
            logger.info("reference: the policy without its adapters (--ref-model: another model)")
        if self.options.no_overlap_reference and (reason := self._why_not_overlapped()):
            logger.info("reference: --no-overlap-reference has no effect, as %s", reason)

    @property
    def needs_reference(self) -> bool:
        """Whether what a reference says counts."""
        return True

    @property
    def models(self) -> tuple[ModelRole, ...]:
        """The policy, and a reference if it is not the policy without adapters."""
        policy = ModelRole("policy")
        if self.is_own_reference:
            return (policy,)
        return policy, ModelRole("reference", trainable=False, saved=False, source="ref_model")

    @property
    def is_own_reference(self) -> bool:
        """Whether the reference is the policy without its adapters.

        Not where routers are trained whole: without adapters they are still trained ones.
        """
        lora = self.setup.lora
        return lora is not None and not lora.routers and self.options.ref_model is None

    @cached_property
    def reference_fingerprint(self) -> str:
        """A digest of the files that the reference is loaded from."""
        source = self.options.ref_model or self.options.load
        if self.is_own_reference or self.options.from_scratch or source is None:
            return ""
        return digest_of_samples(detect(source))

    def model_shape(self, role: ModelRole) -> ModelConfig:
        """Return the sizes of a model; the reference has those of the policy."""
        if role.name == "reference":
            self._check_reference()
        return super().model_shape(role)

    def reference_log_probs(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the reference's log-probabilities of all sequences, on the last stage."""

        def compute() -> list[torch.Tensor]:
            return self.sequence_log_probs(self._reference, batches, self._without_adapters())

        return self._side_stream.run(compute) if self._side_stream is not None else compute()

    def sequence_log_probs(
        self,
        model: RoleModel,
        batches: Sequence[Batch],
        context: AbstractContextManager[None] | None = None,
    ) -> list[torch.Tensor]:
        """Return a model's log-probabilities of all sequences, on the last stage."""
        group = self.context_group
        with context or nullcontext():
            return self.collect(
                model, batches, lambda batch, losses: sequence_log_probs(losses, batch, group)[0]
            )

    def with_reference(self, batches: list[Batch]) -> list[Batch]:
        """Return the micro-batches with the reference's log-probabilities."""
        found = self.reference_log_probs(batches)
        return [{**batch, REFERENCE: each} for batch, each in zip(batches, found)] or batches

    @cached_property
    def _side_stream(self) -> SideStream | None:
        """Where the reference runs beside the policy's step before; None if it does not."""
        is_off = self.options.no_overlap_reference or self._why_not_overlapped() is not None
        return None if is_off else SideStream()

    def _why_not_overlapped(self) -> str | None:
        """Return why the reference cannot run beside a step of the policy; None if it can."""
        dims = self.setup.dims
        reasons = {
            "it shares its weights with the policy": self.is_own_reference,
            # They would share buffers and communicators.
            "the models are split over ranks": dims.dp != dims.world or dims.ep > 1,
            "kernels of this device do not overlap": not device.current().overlaps_kernels,
        }
        return next((reason for reason, is_there in reasons.items() if is_there), None)

    @property
    def _reference(self) -> RoleModel:
        return self.primary if self.is_own_reference else self.model("reference")

    def _without_adapters(self) -> AbstractContextManager[None]:
        return without_adapters(self.primary.chunks) if self.is_own_reference else nullcontext()

    def _check_reference(self) -> None:
        """Refuse weights that are not those of a reference."""
        options = self.options
        if options.ref_model is not None:
            self.check_same_shape("--ref-model", options.ref_model, "reference")
            return
        resumed = None if options.from_scratch else find_resume(options)
        if resumed is not None and options.load and resumed.is_relative_to(options.load):
            raise ConfigError(
                f"--ref-model is missing: --load {options.load} is a run to resume, and the "
                "reference is the model that it started from: give that as --ref-model"
            )

    def check_same_shape(
        self, flag: str, folder: str, what: str, *, has_value_head: bool = False
    ) -> None:
        """Raise if a model that is built like the policy, but for its head, is of another shape."""
        options = self.options
        try:
            found = detect(folder)
            # All run with the config that the policy is given.
            config = Path(options.hf_cfg_dir) if options.hf_cfg_dir else config_folder(found)
            source = open_source(
                found, config, named=options.model_type_hf, noop_layers=options.noop_layers
            )
        except ConfigError as error:
            raise ConfigError(f"{flag} {error}") from None
        shapes = [source.config, self.setup.shape]
        if has_value_head:  # a new one, if the model has none
            shapes = [shape.with_value_head() for shape in shapes]
        theirs, ours = (_flat(shape.model_dump()) for shape in shapes)
        for name in dict.fromkeys([*ours, *theirs]):
            one, other = theirs.get(name), ours.get(name)
            if name not in NOT_COMPARED and not _is_same(one, other):
                raise ConfigError(
                    f"{flag} {folder}: its {name} is {one}, the policy's {other}: the {what} must "
                    "be of the same shape"
                )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {}
        flat |= inner or {f"{prefix}{name}": value}
    return flat


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)  # some files keep 32 bits of an epsilon
    return bool(one == other)
