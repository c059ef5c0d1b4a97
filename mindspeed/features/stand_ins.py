"""Packages that Megatron asks for and that answer from here where the real ones are absent."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindspeed.features.base import Effect, Feature, Level
from mindspeed.patching import Aliases


@contextmanager
def _served(name: str, stand_in: str) -> Iterator[None]:
    aliases = Aliases()
    aliases.serve(name, stand_in)
    yield
    aliases.revert()


class _StandIn(Feature):
    """Serves our modules under other people's names; steps aside for the real package."""

    group = "Foundation"
    level = Level.COMPAT
    served: dict[str, str]

    def effects(self, options: Any) -> Iterator[Effect]:
        """Serve each name that nothing real answers to."""
        for name, stand_in in self.served.items():
            yield Effect(f"{name} is {stand_in} unless installed", _served(name, stand_in))


class TransformerEngineSocket(_StandIn):
    """The socket through which Megatron's default layer specs reach their accelerator."""

    name = "transformer_engine_socket"
    title = "Transformer Engine socket"
    served = {"transformer_engine": "mindspeed.te"}


class ApexStandIn(_StandIn):
    """apex's fused layer norm and weight-gradient product, which local specs ask for."""

    name = "apex_stand_in"
    title = "Stand-in for apex"
    served = {
        "apex": "mindspeed.compat.apex",
        "fused_weight_gradient_mlp_cuda": "mindspeed.compat.fused_weight_gradient_mlp_cuda",
    }


class MegatronTrainingStandIn(_StandIn):
    """get_model and the null tokenizer, which megatron-core wheels before 0.19 leave out."""

    name = "megatron_training_stand_in"
    title = "Stand-in for megatron.training"
    served = {"megatron.training": "mindspeed.compat.megatron_training"}
