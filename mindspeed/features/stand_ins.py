"""Packages that Megatron asks for and that answer from here where the real ones are absent."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindspeed.features.base import Effect, Feature, Level
from mindspeed.patching import Aliases


@contextmanager
def _served(name: str, stand_in: str, without: str | None) -> Iterator[None]:
    aliases = Aliases()
    aliases.serve(name, stand_in, without)
    yield
    aliases.revert()


class _StandIn(Feature):
    """Serves our modules under other people's names; steps aside for the real package."""

    group = "Foundation"
    level = Level.COMPAT
    served: dict[str, str]
    without: str | None = None
    """The package whose absence makes the real ones useless; None where they are absent."""

    def effects(self, options: Any) -> Iterator[Effect]:
        """Serve each name that nothing real answers to."""
        needed = self.without or "it"
        for name, stand_in in self.served.items():
            what = f"{name} is {stand_in} unless {needed} is installed"
            yield Effect(what, _served(name, stand_in, self.without))


class TransformerEngineSocket(_StandIn):
    """The socket through which Megatron's default layer specs reach their accelerator."""

    name = "transformer_engine_socket"
    title = "Transformer Engine socket"
    served = {"transformer_engine": "mindspeed.te"}


class ApexStandIn(_StandIn):
    """apex's fused layer norm, softmax and weight-gradient product: local specs ask for them."""

    name = "apex_stand_in"
    title = "Stand-in for apex"
    served = {
        "apex": "mindspeed.compat.apex",
        "fused_weight_gradient_mlp_cuda": "mindspeed.compat.fused_weight_gradient_mlp_cuda",
        "scaled_masked_softmax_cuda": "mindspeed.compat.scaled_softmax.masked",
        "scaled_softmax_cuda": "mindspeed.compat.scaled_softmax.plain",
        "scaled_upper_triang_masked_softmax_cuda": "mindspeed.compat.scaled_softmax.causal",
    }


class GroupedGemmStandIn(_StandIn):
    """The products of Megatron's legacy GroupedMLP, whose package exists for CUDA only."""

    name = "grouped_gemm_stand_in"
    title = "Stand-in for grouped_gemm"
    served = {"grouped_gemm": "mindspeed.compat.grouped_gemm"}


class MegatronTrainingStandIn(_StandIn):
    """get_model, which wheels before megatron-core 0.19 lack, and the tokenizer that 0.19 lacks.

    The second name only counts where the first is real.
    """

    name = "megatron_training_stand_in"
    title = "Stand-in for megatron.training"
    served = {
        "megatron.training": "mindspeed.compat.megatron_training",
        "megatron.training.tokenizer": "mindspeed.compat.megatron_training.tokenizer",
    }


class TritonModuleStandIns(_StandIn):
    """Modules of Megatron that import triton at their top and are imported without need of it.

    triton itself stays absent: where Megatron has a way without it, that is the way taken.
    """

    name = "triton_module_stand_ins"
    title = "Stand-ins for modules that need triton"
    without = "triton"
    served = {
        "megatron.core.transformer.custom_layers.batch_invariant_kernels": (
            "mindspeed.compat.batch_invariant_kernels"
        ),
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops": (
            "mindspeed.compat.inference_tensor_ops"
        ),
    }
