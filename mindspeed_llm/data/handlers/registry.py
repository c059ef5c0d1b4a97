"""The handlers by the names that `--handler-name` accepts."""

from mindspeed.config import ConfigError, did_you_mean
from mindspeed_llm.data.handlers.alpaca import (
    AlpacaStyleInstructionHandler,
    AlpacaStyleKTOHandler,
    AlpacaStylePairwiseHandler,
    AlpacaStyleProcessRewardHandler,
    StepwiseProcessRewardHandler,
)
from mindspeed_llm.data.handlers.base import Handler
from mindspeed_llm.data.handlers.messages import (
    OpenAIInstructionHandler,
    SharegptStyleInstructionHandler,
    SharegptStyleKTOHandler,
    SharegptStylePairwiseHandler,
)
from mindspeed_llm.data.handlers.preferences import OpenAIKTOHandler, OpenAIPairwiseHandler
from mindspeed_llm.data.handlers.prompts import (
    OpenAIPromptHandler,
    PPOAlpacaStyleInstructionHandler,
    R1AlpacaStyleInstructionHandler,
    R1SharegptStyleInstructionHandler,
)

PRETRAIN = "GeneralPretrainHandler"
"""Plain documents; they are not rendered, so they have no handler class."""
HANDLERS: dict[str, type[Handler]] = {
    handler.__name__: handler
    for handler in (
        AlpacaStyleInstructionHandler,
        AlpacaStyleKTOHandler,
        AlpacaStylePairwiseHandler,
        AlpacaStyleProcessRewardHandler,
        OpenAIInstructionHandler,
        OpenAIKTOHandler,
        OpenAIPairwiseHandler,
        OpenAIPromptHandler,
        PPOAlpacaStyleInstructionHandler,
        R1AlpacaStyleInstructionHandler,
        R1SharegptStyleInstructionHandler,
        SharegptStyleInstructionHandler,
        SharegptStyleKTOHandler,
        SharegptStylePairwiseHandler,
        StepwiseProcessRewardHandler,
    )
}


def similar_handlers(handler: type[Handler]) -> dict[str, type[Handler]]:
    """Return the handlers that make the same kind of data, that one included."""
    kind = (handler.outputs, handler.needs_chat)
    return {n: one for n, one in HANDLERS.items() if (one.outputs, one.needs_chat) == kind}


def find_handler(name: str) -> type[Handler] | None:
    """Return the handler of a name, None for plain documents."""
    if name == PRETRAIN:
        return None
    if name not in HANDLERS:
        raise ConfigError(
            f"--handler-name {name} is not known; {did_you_mean(name, [PRETRAIN, *HANDLERS])}"
        )
    return HANDLERS[name]
