"""How fast is each operator next to eager torch, torch.compile, Liger and the memory's own speed?

    python benchmarks/bench_ops.py [--only rms_norm,swiglu] [--quick] [--seconds-per-case 3]

Races the cases of benchmarks/ops/*.py (see the README there), peers in turns in one process. Writes
ops.csv and, with matplotlib, ops.png. The exit code is 1 when a result of ours is wrong.
"""

import argparse
import contextlib
import difflib
import gc
import importlib
import importlib.metadata
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from op_case import OURS  # noqa: E402
from op_clock import make_clock  # noqa: E402
from op_gate import expected_results, judge, run_pass  # noqa: E402
from op_table import plot, print_rows  # noqa: E402
from record import record  # noqa: E402

LEAST, MOST = 20, 200  # samples of a peer
FEWEST, TOO_LONG = 9, 4  # for passes so long that LEAST would take this many times their seconds


@dataclass
class Entrant:
    """One peer on one pass, ready to run."""

    name: str
    call: Any
    replay: Any
    timed: str
    launches: Any
    peak: Any


class Bench:
    """Races cases on one clock and collects the rows."""

    def __init__(self, clock, seconds, without=()):
        self.clock = clock
        self.seconds = seconds
        self.without = without
        self.ceilings = clock.ceilings()
        self.run = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.rows = []
        self.failures = []

    def race(self, case):
        """Check every peer of a case, then race those that ran."""
        torch._dynamo.reset()  # a case is one shape; compiled peers of others are dropped
        peers = {
            name: peer
            for name, peer in case.peers.items()
            if peer is not None and name not in self.without
        }
        absent = sorted(case.peers.keys() - peers.keys())
        note = f"  (not here: {', '.join(absent)})" if absent else ""
        print(f"{case.op} {case.shape} {_short(case.dtype)}{note}", flush=True)
        verdicts = self._judge_all(case, peers)
        torch.manual_seed(0)
        inputs = case.make_inputs(self.clock.device)
        for which, work in case.work.items():
            entrants = self._enter_all(
                case, {name: peers[name] for name in verdicts}, inputs, which
            )
            self._collect(case, which, work, self._sample(entrants), verdicts)
            del entrants
            self.clock.release()

    def _judge_all(self, case, peers):
        torch.manual_seed(0)
        inputs = (case.gate_inputs or case.make_inputs)(self.clock.device)
        expected = expected_results(case, inputs)
        verdicts = {}
        for name, peer in peers.items():
            with self.telling(case.op, case.shape, name):
                verdict = judge(case, peer, inputs, expected)
                repeats = verdict.repeats or not case.must_repeat
                if name == OURS and not (repeats and verdict.error <= case.allowed_error):
                    raise ValueError(
                        f"error {verdict.error:.2e} (allowed {case.allowed_error:.0e}), two runs "
                        f"{'equal' if verdict.repeats else 'differ'}"
                    )
                verdicts[name] = verdict
        self.clock.release()
        return verdicts

    @contextlib.contextmanager
    def telling(self, *where):
        """Leave out what cannot run, and say so; where it is ours, it is a failure."""
        try:
            yield
        except Exception as error:  # a peer's kernel may raise whatever it likes
            text = f"{' '.join(where)}: {type(error).__name__}: {str(error)[:300]}"
            print(f"  FAILED {text}", flush=True)
            if where[-1] == OURS:
                self.failures.append(text)

    def _enter_all(self, case, peers, inputs, which):
        entrants = []
        for name, peer in peers.items():
            with self.telling(case.op, case.shape, name):
                entrants.append(self._enter(name, run_pass(peer, inputs, which)))
        for name, prepare in case.yardsticks.items():
            with self.telling(case.op, case.shape, name):
                entrants.append(self._enter(name, prepare(*inputs)[which]))
        return entrants

    def _enter(self, name, call):
        for _ in range(3):
            call()
        peak, launches = self.clock.peak_bytes(call), self.clock.launches(call)
        replay, timed = self.clock.capture(call)
        return Entrant(name, call, replay, timed, launches, peak)

    def _sample(self, entrants):
        """Take samples in turns until the time is up; return them by entrant."""
        samples = [(entrant, [], []) for entrant in entrants]
        start = time.perf_counter()
        for count in range(MOST):
            seconds = time.perf_counter() - start
            enough = FEWEST if seconds > TOO_LONG * self.seconds else LEAST
            if count >= enough and seconds > self.seconds:
                break
            for entrant, gpu, wall in samples:
                gpu.append(self.clock.gpu_seconds(entrant.replay))
                wall.append(self.clock.wall_seconds(entrant.call))
        return samples

    def _collect(self, case, which, work, samples, verdicts):
        floor = work.floor(*self.ceilings)
        medians = {entrant.name: statistics.median(gpu) for entrant, gpu, _ in samples}
        others = [medians[name] for name in verdicts if name in medians and name != OURS]
        for entrant, gpu, wall in samples:
            low, middle, high = _spread(gpu)
            verdict = verdicts.get(entrant.name)
            row = {
                "op": case.op,
                "shape": case.shape,
                "dtype": _short(case.dtype),
                "pass": which,
                "peer": entrant.name,
                "gpu_us": _micro(middle),
                "p20_us": _micro(low),
                "p80_us": _micro(high),
                "wall_us": _micro(statistics.median(wall)),
                "floor_us": _micro(floor),
                "floor_over_time": f"{floor / middle:.3f}",
                "best_other_over_time": f"{min(others) / middle:.3f}" if others else "",
                "peak_mib": f"{entrant.peak / 2**20:.1f}" if entrant.peak != "" else "",
                "launches": entrant.launches,
                "error": f"{verdict.error:.2e}" if verdict else "",
                "bit_equal": verdict.repeats if verdict else "",
                "timed": entrant.timed,
                "samples": len(gpu),
            }
            self.rows.append(row | self._surroundings())
        print_rows(self.rows[len(self.rows) - len(samples) :])

    def _surroundings(self):
        copy, product = self.ceilings
        return {
            "run": self.run,
            "copy_tb_s": f"{copy / 1e12:.3f}",
            "gemm_tflop_s": f"{product / 1e12:.1f}",
            "triton": _version("triton"),
            "liger": _version("liger-kernel"),
        }


def entry_names(only):
    """Return the names of the files in benchmarks/ops, all or those asked for."""
    known = sorted(path.stem for path in (HERE / "ops").glob("*.py"))
    names = only.split(",") if only else known
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise SystemExit(f"--only {name} is not known. Known: {', '.join(known)}.{hint}")
    return names


def main(arguments):
    """Race all cases, then write the results; return the exit code."""
    names = entry_names(arguments.only)
    gc.collect()
    gc.freeze()  # a graph's memory is given back by collections, which need not visit the imports
    clock = make_clock()
    seconds = arguments.seconds_per_case
    if arguments.quick:
        seconds = 0.2
        # torch.compile would try its own product kernels for minutes, and end with cuBLAS.
        torch._inductor.config.max_autotune_gemm_backends = "ATEN"
    bench = Bench(clock, seconds, arguments.without.split(","))
    copy, product = bench.ceilings
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s", _power())
    on_stream = torch.cuda.stream(clock.stream) if clock.stream else contextlib.nullcontext()
    with on_stream:
        for name in names:
            race_entry(bench, name, arguments)
    if not (bench.rows or bench.failures):
        raise SystemExit(f"--shape {arguments.shape!r} is in no case of {', '.join(names)}")
    print("at the end:", _power())
    plot(bench.rows, arguments.out / "ops.png")
    for failure in bench.failures:
        print(f"FAILED {failure}")
    return 1 if bench.failures else 0


def race_entry(bench, name, arguments):
    """Race the cases of one file and record each at once: a later one may not come back."""
    with bench.telling(name, OURS):
        entry = importlib.import_module(f"ops.{name}")
        for case in entry.TINY if arguments.tiny else entry.CASES:
            if arguments.shape not in f"{case.op} {case.shape}":
                continue
            before = len(bench.rows)
            with bench.telling(case.op, case.shape, OURS):
                bench.race(case)
            if len(bench.rows) > before:
                record("ops", bench.rows[before:], arguments.out)


def _power():
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu"]
    try:
        done = subprocess.run([*command, "--format=csv,noheader"], capture_output=True, text=True)
    except FileNotFoundError:
        return "(no nvidia-smi)"
    return f"({done.stdout.strip()})"


def _spread(samples):
    ordered = sorted(samples)
    return (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.5, 0.8))


def _micro(seconds):
    return f"{seconds * 1e6:.1f}"


def _short(dtype):
    return str(dtype).removeprefix("torch.")


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", default="", help="operators, separated by commas")
    parser.add_argument("--shape", default="", help="cases with this in their name and shape only")
    parser.add_argument("--without", default="", help="peers to leave out, e.g. compile,liger")
    parser.add_argument("--quick", action="store_true", help="as few samples as make a median")
    parser.add_argument("--seconds-per-case", type=float, default=2.0, help="a pass of a case")
    parser.add_argument("--tiny", action="store_true", help="the tiny cases, e.g. on a cpu")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    sys.exit(main(parser.parse_args()))
