"""Train any model of transformers from its Hugging Face folder."""

import copy
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from mindspeed.config import ConfigError
from mindspeed.fsdp import FsdpOptions
from mindspeed.ops.cross_entropy import cross_entropy
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.fused_ops import fuse, is_enabled
from mindspeed_mm.models.loss import IGNORED, LossHead, next_tokens, reduce_loss
from mindspeed_mm.models.meta_device import meta_parameters
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.models.trainable import add_adapters, freeze
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin
from mindspeed_mm.models.ulysses import ContextParallel
from mindspeed_mm.models.weights import check_pretrained, load_pretrained
from mindspeed_mm.transformers_errors import config_errors

OUTPUTS = ("loss", "logits", "aux_loss")


class TransformersModel(MultiModalModule):
    """A model of transformers and its loss; the model itself is `.model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if config.init_from_hf_path is None:
            raise ConfigError("init_from_hf_path is missing: give a folder with a config.json")
        hf_config = read_hf_config(config)
        model_class = with_mixin(ModelHub.build(config, hf_config))
        if config.init_model_with_meta_device:
            with meta_parameters():
                self.model = _build(model_class, hf_config, config.init_from_hf_path)
        else:
            if not nn.LayerNorm(1).weight.is_meta:  # the caller may build on meta
                _check_weights(model_class, hf_config, config.init_from_hf_path)
            self.model = _build(model_class, hf_config, config.init_from_hf_path)
            if not _is_on_meta(self.model):
                load_pretrained(self.model, config.init_from_hf_path)
        _check_loss(self.model)
        self.model.register_forward_hook(_drop_features)
        self.model.train()
        if is_enabled(config.fused_ops):
            fuse(self.model)
        self._freeze()
        self._parallel: ContextParallel | None = None
        self._head: LossHead | None = None
        loss = config.loss_cfg
        if loss.compute_mode != "default":
            self._head = LossHead(self.model.get_output_embeddings(), loss)

    def unwrapped(self) -> nn.Module:
        """Return the model of transformers."""
        return self.model

    def set_context_parallel_group(self, group: ProcessGroup) -> None:
        """Split every sequence among the ranks of a group, which all get the same batch."""
        loss = self.config.loss_cfg
        if group.size() > 1 and loss.loss_type in ("per_sample_loss", "square_loss"):
            raise ConfigError(
                f"loss_type: {loss.loss_type} needs unsplit samples: use default or per_token_loss "
                "with context_parallel_size > 1"
            )
        if group.size() > 1 and loss.router_aux_loss_coef:
            raise ConfigError(
                f"router_aux_loss_coef: {loss.router_aux_loss_coef} needs unsplit sequences: use 0 "
                "with context_parallel_size > 1"
            )
        self._parallel = ContextParallel(self.model, group)

    def fully_shard(
        self,
        process_group: ProcessGroup | None = None,
        fsdp2_config: FsdpOptions | str | os.PathLike[str] | None = None,
    ) -> bool:
        """Shard the model of transformers; patterns are relative to it."""
        return self.model.fully_shard(process_group, fsdp2_config)

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        """Return loss and token_nums where there are labels, else logits; see docs/mm/models.md."""
        parallel = self._parallel
        if parallel is not None:
            batch = parallel.padded(batch)
        labels = batch.pop("labels", None)
        if self.config.loss_cfg.router_aux_loss_coef:
            batch["output_router_logits"] = True
        if labels is None:
            return {"logits": self._run(batch).logits}
        targets = next_tokens(labels)
        if parallel is not None:
            targets = parallel.local(targets)
        if self._head is None:
            outputs = self._run(batch)
            losses = cross_entropy(outputs.logits, targets, ignore_index=IGNORED)
        else:
            with self._head.losses_of(targets):
                outputs = self._run(batch)
                losses = outputs.logits
                self._head.check(losses, self.model)
        result = {
            "loss": reduce_loss(losses, targets, self.config.loss_cfg.loss_type),
            "token_nums": (targets != IGNORED).sum(),
        }
        return result | self._extras(outputs)

    def _run(self, batch: dict[str, Any]) -> Any:
        outputs = self.model(**batch, use_cache=False)
        if getattr(outputs, "logits", None) is None:
            raise ConfigError(
                f"{type(self.model).__name__} computes no logits: name a class with an output "
                "layer in architectures of config.json, such as ..ForCausalLM"
            )
        return outputs

    def _extras(self, outputs: Any) -> dict[str, torch.Tensor]:
        extras = {} if self._head is not None else {"logits": outputs.logits}
        if coefficient := self.config.loss_cfg.router_aux_loss_coef:
            if getattr(outputs, "aux_loss", None) is None:
                raise ConfigError(
                    f"router_aux_loss_coef: {coefficient}: {type(self.model).__name__} has no "
                    "experts, or no auxiliary loss of them: use 0"
                )
            extras["aux_loss"] = coefficient * outputs.aux_loss
        return extras

    def _freeze(self) -> None:
        own = getattr(self.model, "freeze", None)
        if callable(own):
            own(self.config)
        freeze(self.model, self.config)
        if self.config.lora is not None:
            add_adapters(self.model, self.config.lora)


def read_hf_config(config: ModelConfig) -> Any:
    """Read config.json, with the changes of the model section."""
    from transformers import AutoConfig

    path = Path(config.init_from_hf_path or "") / "config.json"
    if not path.is_file():
        raise ConfigError(f"init_from_hf_path: {path} does not exist: give a Hugging Face folder")
    with config_errors(str(path)):
        found = AutoConfig.from_pretrained(
            path.parent, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    if config.tie_word_embeddings is not None:
        found.tie_word_embeddings = config.tie_word_embeddings
        found.get_text_config().tie_word_embeddings = config.tie_word_embeddings
    if attention := _attention(config, found):
        found._attn_implementation = attention
    found.use_cache = False
    return found


def with_mixin(model_class: type) -> type:
    """Return the class, with FSDP2Mixin added if it lacks it."""
    if issubclass(model_class, FSDP2Mixin):
        return model_class
    attributes = {"__module__": model_class.__module__, "__doc__": model_class.__doc__}
    return type(model_class.__name__, (model_class, FSDP2Mixin), attributes)


def _build(model_class: Any, hf_config: Any, folder: str) -> Any:
    """Build the model in float32: the compute dtype is chosen by the sharding options."""
    change = getattr(model_class, "overwrite_transformer_config", None)
    if callable(change):
        hf_config = change(copy.deepcopy(hf_config)) or hf_config
    with config_errors(f"{Path(folder) / 'config.json'}: {model_class.__name__}"):
        return model_class._from_config(hf_config, dtype=torch.float32)


def _check_weights(model_class: Any, hf_config: Any, folder: str) -> None:
    """Check the weights before memory is allocated: with a wrong size that may take minutes.

    Only for classes of transformers: others may compute with parameters while they are built.
    """
    if model_class.__module__.startswith("transformers."):
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            check_pretrained(_build(model_class, hf_config, folder), folder)


def _check_loss(model: Any) -> None:
    """Reject classes that are not trained to predict the next token of their input."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    is_next_token = getattr(model, "loss_function", ForCausalLMLoss) is ForCausalLMLoss
    if not is_next_token or getattr(model.config, "is_encoder_decoder", False):
        kind = "has an encoder and a decoder" if is_next_token else "has another loss"
        raise ConfigError(
            f"{type(model).__name__} {kind}: models that predict the next token of their input are "
            "supported (..ForCausalLM, most ..ForConditionalGeneration)"
        )


def _drop_features(model: nn.Module, args: Any, output: Any) -> Any:
    """In training, drop features, which FSDP2 would otherwise prepare a backward pass for."""
    if not model.training or not isinstance(output, dict):
        return output
    return type(output)(**{name: output[name] for name in OUTPUTS if name in output})


def _attention(config: ModelConfig, hf_config: Any) -> Any:
    sections = {
        "vision_config": config.image_encoder.vision_encoder.attn_implementation,
        "text_config": config.text_decoder.attn_implementation,
    }
    given = {k: v for k, v in sections.items() if v is not None and k in hf_config.sub_configs}
    if not given:
        return config.attn_implementation
    return ({"": config.attn_implementation} if config.attn_implementation else {}) | given


def _is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())
