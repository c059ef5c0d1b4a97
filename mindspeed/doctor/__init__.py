"""Can a training run start on this machine? Each check returns a record."""

from mindspeed.doctor.checks import Check, Status, is_ready, run_checks

__all__ = ["Check", "Status", "is_ready", "run_checks"]
