"""Can a training run start on this machine? Each check returns a record."""

from mindspeed.doctor.check import Check, Status
from mindspeed.doctor.examination import examine, ready

__all__ = ["Check", "Status", "examine", "ready"]
