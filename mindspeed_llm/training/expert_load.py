"""Reports of the load of a model's experts in the log of its training."""

from mindspeed import device
from mindspeed.moe.load import LoadMonitor, by_layer, summary
from mindspeed.moe.load_table import LoadTable
from mindspeed.training.log import TrainingLog
from mindspeed_llm.training.model import RoleModel
from mindspeed_llm.training.options import TrainOptions


class ExpertLoadReport:
    """Writes the load of every layer of experts each `interval` steps."""

    def __init__(self, model: RoleModel, interval: int) -> None:
        self._config, self._interval = model.config, interval
        self._monitor = LoadMonitor(model.chunks, model.config.num_layers)

    def __call__(self, iteration: int, log: TrainingLog) -> None:
        """Report after an iteration, where a report is due."""
        if iteration % self._interval:
            return
        loads = self._monitor.read(self._config.num_moe_experts, device.current().torch_device)
        if not loads:
            return
        table = LoadTable(
            iteration, [load.layer for load in loads], [load.shares for load in loads]
        )
        log.add_report(iteration, "expert load", summary(loads), by_layer(loads), table.fields())
        if log.is_writer:
            self._monitor.warn_once(loads, iteration)


def expert_load_report(model: RoleModel, options: TrainOptions) -> ExpertLoadReport | None:
    """Return the report of a model, None where it has no experts or none is asked for."""
    interval = options.moe_load_interval
    interval = options.log_interval if interval is None else interval
    if model.config.num_moe_experts is None or not interval:
        return None
    return ExpertLoadReport(model, interval)
