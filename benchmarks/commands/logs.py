"""Parse the logs of training commands: seconds, tokens and loss of each step, peak memory."""

import ast
import json
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Stamped = tuple[float, str]
"""When a line was printed, in seconds, and the line."""

_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|")
_FIELD = re.compile(r"\| *([^|:]+): *([^| ]+) *(?=\|)")
_MEGATRON_PEAK = re.compile(r"memory \(MB\).*?\| max allocated: ([0-9.]+)")
_OUR_PEAK = re.compile(r"peak memory of rank 0: ([0-9.]+) GiB(?:, on the host ([0-9.]+) GiB)?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TITAN = re.compile(r"step: *(\d+) +loss: *([0-9.naif]+).*?memory: *([0-9.]+)GiB.*?tps: *([0-9,]+)")
_DICTIONARY = re.compile(r"\{'loss': .*?\}")


@dataclass(frozen=True)
class Step:
    """One line of a log: a step and how long it took."""

    number: int
    seconds: float
    tokens: float
    loss: float


@dataclass
class Log:
    """The steps of one run."""

    steps: list[Step] = field(default_factory=list)
    peak_gib: float | None = None
    host_gib: float | None = None
    until_first_step: float | None = None
    """Seconds from the start of the process to the line of its first step."""

    def _add(self, step: Step, stamp: float) -> None:
        if not self.steps:
            self.until_first_step = stamp
        self.steps.append(step)

    def _update_peak(self, gib: float) -> None:
        self.peak_gib = max(gib, self.peak_gib or 0.0)


def read_megatron(lines: Iterable[Stamped], tokens_per_step: int | None) -> Log:
    """Parse Megatron's lines, also ours, which print tokens/s."""
    log = Log()
    for stamp, line in lines:
        if found := _MEGATRON_PEAK.search(line):
            log._update_peak(float(found[1]) / 1024)
        if found := _OUR_PEAK.search(line):
            log._update_peak(float(found[1]))
            log.host_gib = float(found[2]) if found[2] else None
        if not (found := _ITERATION.search(line)):
            continue
        fields = {name.strip(): value for name, value in _FIELD.findall(line)}
        if "elapsed time per iteration (ms)" not in fields:
            continue  # an evaluation
        seconds = float(fields["elapsed time per iteration (ms)"]) / 1000
        tokens = tokens_per_step or float(fields["tokens/s"]) * seconds
        loss = float(fields.get("lm loss", fields.get("loss", "nan")))
        log._add(Step(int(found[1]), seconds, tokens, loss), stamp)
    return log


def read_titan(lines: Iterable[Stamped], tokens_per_step: int | None) -> Log:
    """Parse torchtitan's lines; its memory is the reserved one."""
    assert tokens_per_step is not None, "torchtitan prints tokens/s, not the number of tokens"
    log = Log()
    for stamp, line in lines:
        if found := _TITAN.search(_COLOUR.sub("", line)):
            speed = float(found[4].replace(",", ""))
            seconds = tokens_per_step / speed if speed else float("inf")
            log._update_peak(float(found[3]))
            log._add(Step(int(found[1]), seconds, tokens_per_step, float(found[2])), stamp)
    return log


def read_json(lines: Iterable[Stamped], tokens_per_step: int | None) -> Log:
    """Parse the JSON lines of steps.py, which the peers' scripts use."""
    log = Log()
    for stamp, line in lines:
        if not line.startswith('{"step": '):
            continue
        numbers = json.loads(line)
        log._update_peak(numbers["peak_gib"])
        seconds, tokens = numbers["seconds"], numbers["tokens"]
        log._add(Step(numbers["step"], seconds, tokens, numbers["loss"]), stamp)
    return log


def read_arrivals(lines: Iterable[Stamped], tokens_per_step: int | None) -> Log:
    """Parse transformers' own lines, which have no times: take when they were printed."""
    log, before, seen = Log(), 0.0, 0
    for stamp, line in lines:
        if not (found := _DICTIONARY.search(line)):
            continue
        numbers = ast.literal_eval(found[0])
        total = int(numbers.get("num_input_tokens_seen", seen))
        tokens = total - seen or tokens_per_step or 0
        number = len(log.steps) + 1
        log._add(Step(number, stamp - before, tokens, float(numbers["loss"])), stamp)
        before, seen = stamp, total
    return log


def read_swift(lines: Iterable[Stamped], tokens_per_step: int | None) -> Log:
    """Parse ms-swift's lines, which print the mean seconds of all steps so far."""
    assert tokens_per_step is not None, "ms-swift does not print the number of tokens"
    log, before = Log(), 0.0
    for stamp, line in lines:
        if not (found := _DICTIONARY.search(line)):
            continue
        numbers, count = ast.literal_eval(found[0]), len(log.steps) + 1
        total = numbers["train_speed(s/it)"] * count
        log._update_peak(numbers["memory(GiB)"])
        log._add(Step(count, total - before, tokens_per_step, numbers["loss"]), stamp)
        before = total
    return log


FORMATS: dict[str, Callable[[Iterable[Stamped], int | None], Log]] = {
    "megatron": read_megatron,
    "titan": read_titan,
    "json": read_json,
    "arrivals": read_arrivals,
    "swift": read_swift,
}


def summarise(log: Log, warm_up: int) -> dict[str, str]:
    """Return the columns of a row, without the warm-up steps."""
    first, kept = log.steps[0], log.steps[warm_up:]
    speeds = sorted(step.tokens / step.seconds for step in kept)
    numbers = {
        "tokens_per_s": statistics.median(speeds),
        "mean_tokens_per_s": sum(s.tokens for s in kept) / sum(s.seconds for s in kept),
        "slowest": speeds[0],
        "fastest": speeds[-1],
    }
    return {name: f"{value:.0f}" for name, value in numbers.items()} | {
        "step_ms": f"{1000 * statistics.median(step.seconds for step in kept):.1f}",
        "first_step_s": f"{first.seconds:.2f}",
        "until_step_1_s": f"{log.until_first_step:.1f}",
        "peak_gib": "" if log.peak_gib is None else f"{log.peak_gib:.1f}",
        "steps": str(len(kept)),
        "loss": f"{log.steps[-1].loss:.3f}",
    }
