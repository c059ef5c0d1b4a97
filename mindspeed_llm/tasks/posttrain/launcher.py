"""Choose the trainer of a stage."""

from contextlib import AbstractContextManager, nullcontext

from mindspeed.training.checkpoint_dir import TrainState
from mindspeed.training.entry import exit_on_config_error, script_mode
from mindspeed.training.stages import stage_named
from mindspeed_llm.tasks.posttrain.base import BaseTrainer
from mindspeed_llm.tasks.posttrain.dpo import DPOTrainer
from mindspeed_llm.tasks.posttrain.grpo import GRPOTrainer
from mindspeed_llm.tasks.posttrain.kto import KTOTrainer
from mindspeed_llm.tasks.posttrain.orm import ORMTrainer
from mindspeed_llm.tasks.posttrain.ppo import TrlPPOTrainer
from mindspeed_llm.tasks.posttrain.prm import PRMTrainer
from mindspeed_llm.tasks.posttrain.sft import SFTTrainer
from mindspeed_llm.tasks.posttrain.simpo import SimPOTrainer
from mindspeed_llm.training.options import TrainOptions, parse

TRAINERS: dict[str, type[BaseTrainer]] = {
    "sft": SFTTrainer,
    "dpo": DPOTrainer,
    "simpo": SimPOTrainer,
    "kto": KTOTrainer,
    "orm": ORMTrainer,
    "prm": PRMTrainer,
    "trl_ppo": TrlPPOTrainer,
    "grpo": GRPOTrainer,
}


def get_trainer(stage: str, options: TrainOptions) -> BaseTrainer:
    """Build the trainer of a stage."""
    stage_named(stage)  # refuses one that there is not
    return TRAINERS[stage](options)


class AutoTrainer:
    """The trainer that --stage names, with the options given or those of the command line.

    Without options this is a script: it logs and exits as the commands do.
    """

    def __init__(self, options: TrainOptions | None = None) -> None:
        self._is_script = options is None
        if self._is_script:
            script_mode()
        with self._errors():
            self.options = parse() if options is None else options
            self.trainer = get_trainer(self.options.stage, self.options)

    def train(self) -> TrainState:
        """Train to the last step; Stopped is raised if the run is asked to stop before."""
        with self._errors():
            return self.trainer.train()

    def _errors(self) -> AbstractContextManager[None]:
        return exit_on_config_error() if self._is_script else nullcontext()
