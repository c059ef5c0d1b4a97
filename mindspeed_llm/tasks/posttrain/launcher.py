"""Choose the trainer of a stage."""

from mindspeed.config import ConfigError, did_you_mean
from mindspeed_llm.tasks.posttrain.base import BaseTrainer
from mindspeed_llm.tasks.posttrain.sft import SFTTrainer
from mindspeed_llm.training.arguments import parse
from mindspeed_llm.training.folders import Progress
from mindspeed_llm.training.options import TrainOptions

TRAINERS: dict[str, type[BaseTrainer]] = {"sft": SFTTrainer}


def get_trainer(stage: str, options: TrainOptions) -> BaseTrainer:
    """Build the trainer of a stage."""
    if stage not in TRAINERS:
        raise ConfigError(f"--stage {stage} is not known; {did_you_mean(stage, TRAINERS)}")
    return TRAINERS[stage](options)


class AutoTrainer:
    """The trainer that --stage names, with the options given or those of the command line."""

    def __init__(self, options: TrainOptions | None = None) -> None:
        self.options = parse() if options is None else options
        self.trainer = get_trainer(self.options.stage, self.options)

    def train(self) -> Progress:
        """Train to the end, or until asked to stop."""
        return self.trainer.train()
