"""The registry of model classes; unregistered models use the class in config.json."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from mindspeed.config import ConfigError, did_you_mean
from mindspeed_mm.optional_packages import transformers_class

ClassT = TypeVar("ClassT", bound=type)


class ModelHub:
    """Model classes by id; add to MODEL_MAPPINGS, or decorate with register."""

    MODEL_MAPPINGS: ClassVar[dict[str, type]] = {}

    @classmethod
    def register(cls, model_id: str) -> Callable[[ClassT], ClassT]:
        """Register a class under an id for `model_id` of the model section."""

        def add(model_class: ClassT) -> ClassT:
            if cls.MODEL_MAPPINGS.setdefault(model_id, model_class) is not model_class:
                owner = cls.MODEL_MAPPINGS[model_id].__name__
                raise ConfigError(f"model_id {model_id} is registered by {owner}: use another")
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
                f"{named[0] if named else 'model'} ({hf_config.model_type}): install a "
                "version that has it, register a class and set its model_id, or run the code of "
                "the folder with trust_remote_code: true"
            )
        return found

    @classmethod
    def _hint(cls, model_id: str) -> str:
        if not cls.MODEL_MAPPINGS:
            return "no class is: decorate one with @ModelHub.register, or omit model_id"
        return did_you_mean(model_id, cls.MODEL_MAPPINGS)


def _remote(config: Any, hf_config: Any) -> Any:
    """Return the class defined by the Python files of a folder, if they are trusted."""
    named = getattr(hf_config, "auto_map", None) or {}
    kinds = [kind for kind in named if kind.startswith("AutoModel")]
    if not config.trust_remote_code or not kinds:
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    # Of several, the one with a head: AutoModelForCausalLM, not AutoModel.
    kind = max(kinds, key=len)
    return get_class_from_dynamic_module(named[kind], config.init_from_hf_path)
