"""Reports of the load of a model's experts in the log of its training."""

from collections.abc import Callable
from functools import partial

from mindspeed.moe.load import TRAINED, LoadMonitor, LoadRead, by_layer, summary
from mindspeed.moe.load_table import LoadTable
from mindspeed.training.log import TrainingLog
from mindspeed_llm.training.model import RoleModel, has_frozen_routers
from mindspeed_llm.training.options import TrainOptions

FROZEN = (
    "routers are frozen, so the data decides their load; to change it train them "
    "(--lora-train-router with adapters, no --freeze-router)"
)
"""What helps where routers are not trained."""
BIASED = (
    "raise --moe-router-bias-update-rate, by which each step moves the biases that choose experts, "
    "or lower the learning rate"
)
"""What helps where biases balance the load, and no loss has to."""


class ExpertLoadReport:
    """Writes the load of every layer of experts each `interval` steps."""

    def __init__(self, model: RoleModel, interval: int, advice: str) -> None:
        self._config, self._interval, self._advice = model.config, interval, advice
        self._monitor = LoadMonitor(model.chunks, model.config.num_layers)

    def start(self, iteration: int) -> Callable[[TrainingLog], None] | None:
        """Collect the load since the last report, where one is due."""
        if iteration % self._interval:
            return None
        read = self._monitor.start_read(self._config.num_moe_experts)
        return partial(self._write, iteration, read)

    def _write(self, iteration: int, read: LoadRead, log: TrainingLog) -> None:
        loads = read.wait()
        if not loads:
            return
        table = LoadTable(
            iteration, [load.layer for load in loads], [load.shares for load in loads]
        )
        log.add_report(iteration, "expert load", summary(loads), by_layer(loads), table.fields())
        if log.is_writer:
            self._monitor.warn_once(loads, iteration, self._advice)


def expert_load_report(model: RoleModel, options: TrainOptions) -> ExpertLoadReport | None:
    """Return the report of a model, None where it has no experts or none is asked for."""
    interval = options.moe_load_interval
    interval = options.log_interval if interval is None else interval
    if model.config.num_moe_experts is None or not interval:
        return None
    is_biased = model.config.moe_router_enable_expert_bias
    return ExpertLoadReport(model, interval, load_advice(options, is_biased=is_biased))


def load_advice(options: TrainOptions, *, is_biased: bool = False) -> str:
    """Return what helps experts that starve."""
    if has_frozen_routers(options):
        return FROZEN
    return BIASED if is_biased else TRAINED
