"""Which class a model is built from: a registered one, else the one that config.json names."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from mindspeed.config import ConfigError, did_you_mean
from mindspeed_mm.packages import transformers_class

ClassT = TypeVar("ClassT", bound=type)


class ModelHub:
    """The models that are known by an id; add to MODEL_MAPPINGS, or decorate with register."""

    MODEL_MAPPINGS: ClassVar[dict[str, type]] = {}

    @classmethod
    def register(cls, model_id: str) -> Callable[[ClassT], ClassT]:
        """Give a class an id, under which `model_id` of the model section finds it."""

        def add(model_class: ClassT) -> ClassT:
            if cls.MODEL_MAPPINGS.setdefault(model_id, model_class) is not model_class:
                taken = cls.MODEL_MAPPINGS[model_id].__name__
                raise ConfigError(f"model_id {model_id} is taken by {taken}: choose another")
            return model_class

        return add

    @classmethod
    def build(cls, config: Any, hf_config: Any) -> type:
        """Return the class: by model_id, by architectures of config.json, by its model_type."""
        if (model_id := config.model_id) is not None:
            if model_id not in cls.MODEL_MAPPINGS:
                raise ConfigError(f"model_id: {model_id} is not registered; {cls._hint(model_id)}")
            return cls.MODEL_MAPPINGS[model_id]
        import transformers

        named = getattr(hf_config, "architectures", None) or []
        found = transformers_class(str(named[0])) if named else None
        if found is None:
            found = cls.MODEL_MAPPINGS.get(hf_config.model_type)
        if found is None:
            found = _remote(config, hf_config)
        if found is None:
            raise ConfigError(
                f"transformers {transformers.__version__} has no "
                f"{named[0] if named else 'model'} ({hf_config.model_type}): install one that "
                "has, register a class and give its model_id, or let the folder's own code run "
                "with trust_remote_code: true"
            )
        return found

    @classmethod
    def _hint(cls, model_id: str) -> str:
        if not cls.MODEL_MAPPINGS:
            return "nothing is: decorate a class with @ModelHub.register, or leave model_id out"
        return did_you_mean(model_id, cls.MODEL_MAPPINGS)


def _remote(config: Any, hf_config: Any) -> Any:
    """Return the class that the Python files of a folder define, if they may be run."""
    named = getattr(hf_config, "auto_map", None) or {}
    kinds = [kind for kind in named if kind.startswith("AutoModel")]
    if not config.trust_remote_code or not kinds:
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    # Of several, the one with a head: AutoModelForCausalLM, not AutoModel.
    kind = max(kinds, key=len)
    return get_class_from_dynamic_module(named[kind], config.init_from_hf_path)
