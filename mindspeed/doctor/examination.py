"""The whole examination, in the order in which one thing needs another."""

from collections.abc import Sequence

from mindspeed.doctor import hardware, software
from mindspeed.doctor.check import Check, Status


def examine() -> list[Check]:
    """Run every check that makes sense; what needs a missing part is left out."""
    torch = software.check_torch()
    checks = [software.check_python(), torch, software.check_megatron()]
    if ready([torch]):
        checks += hardware.check_devices()
    chosen = hardware.chosen_device() if ready([torch]) else None
    if chosen is not None:
        checks += [hardware.check_process_group(chosen)]
    if ready(checks):
        checks += [software.check_adaptor()]
    if ready([torch]):
        checks += [software.check_operators(chosen.name if chosen else "cpu")]
    if chosen is not None:
        checks += software.check_hopper(chosen)
    checks += [software.check_transformer_engine()]
    checks += [hardware.check_shared_memory(), software.check_compiler()]
    return [*checks, *software.check_optional(chosen.name if chosen else "cpu")]


def ready(checks: Sequence[Check]) -> bool:
    """Tell whether a training run could start."""
    return all(check.status is not Status.FAIL for check in checks)
