"""What one check found."""

import enum
from dataclasses import dataclass


class Status(str, enum.Enum):
    """How a check ended: `fail` means that no training run can start."""

    OK = "ok"
    ABSENT = "-"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the report; `remedy` is the command or action that mends it."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def ok(name: str, detail: str) -> Check:
    """Report that something is as it should be."""
    return Check(name, Status.OK, detail)


def absent(name: str, detail: str) -> Check:
    """Report something that is not there and not missed."""
    return Check(name, Status.ABSENT, detail)


def warn(name: str, detail: str, remedy: str) -> Check:
    """Report something that a run can do without."""
    return Check(name, Status.WARN, detail, remedy)


def fail(name: str, detail: str, remedy: str = "") -> Check:
    """Report something that no run can do without."""
    return Check(name, Status.FAIL, detail, remedy)
