"""Benchmark each operator against eager torch, torch.compile, Liger and the roofline.

    python benchmarks/bench_ops.py [--only norm,swiglu] [--quick] [--seconds-per-case 3]

Runs the cases of benchmarks/ops/*.py (see the README there), samples of all peers interleaved in
one process. Writes ops.csv and, with matplotlib, ops.png. The exit code is 1 if a result of ours is
wrong.
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
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from op_case import OURS, check, expected_results, run_pass  # noqa: E402
from op_clock import make_clock  # noqa: E402
from record import record  # noqa: E402

MIN_SAMPLES, MAX_SAMPLES = 20, 200  # of a peer
# Passes so long that MIN_SAMPLES would take this many times their seconds get fewer.
MIN_LONG_SAMPLES, LONG_FACTOR = 9, 4
COLUMNS = ("pass", "peer", "gpu_us", "wall_us", "floor_over_time", "peak_mib", "launches", "error")


@dataclass
class Candidate:
    """One peer on one pass, ready to run."""

    name: str
    call: Any
    replay: Any
    timed: str
    launches: Any
    peak: Any


class Bench:
    """Runs cases on one clock and collects the rows."""

    def __init__(self, clock, seconds, without=()):
        self.clock = clock
        self.seconds = seconds
        self.without = without
        self.peaks = clock.peaks()
        self.started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.rows = []
        self.failures = []

    def run_case(self, case):
        """Check every peer of a case, then time those that ran."""
        torch._dynamo.reset()  # a case is one shape: drop the compiled peers of others
        peers = {
            name: peer
            for name, peer in case.peers.items()
            if peer is not None and name not in self.without
        }
        absent = sorted(case.peers.keys() - peers.keys())
        note = f"  (not installed: {', '.join(absent)})" if absent else ""
        print(f"{case.op} {case.shape} {_short(case.dtype)}{note}", flush=True)
        checks = self._check_all(case, peers)
        torch.manual_seed(0)
        inputs = case.make_inputs(self.clock.device)
        for which, work in case.work.items():
            candidates = self._prepare_all(
                case, {name: peers[name] for name in checks}, inputs, which
            )
            self._collect(case, which, work, self._sample(candidates), checks)
            del candidates
            self.clock.release()

    def _check_all(self, case, peers):
        torch.manual_seed(0)
        inputs = (case.gate_inputs or case.make_inputs)(self.clock.device)
        expected = expected_results(case, inputs)
        checks = {}
        for name, peer in peers.items():
            with self.reporting(case.op, case.shape, name):
                checked = check(case, peer, inputs, expected)
                is_reproducible = checked.is_reproducible or not case.must_repeat
                if name == OURS and not (is_reproducible and checked.error <= case.allowed_error):
                    raise ValueError(
                        f"error {checked.error:.2e} (allowed {case.allowed_error:.0e}), two runs "
                        f"{'equal' if checked.is_reproducible else 'differ'}"
                    )
                checks[name] = checked
        self.clock.release()
        return checks

    @contextlib.contextmanager
    def reporting(self, *where):
        """Skip what cannot run, and report it; for ours it is a failure."""
        try:
            yield
        except Exception as error:  # a peer's kernel may raise anything
            text = f"{' '.join(where)}: {type(error).__name__}: {str(error)[:300]}"
            print(f"  FAILED {text}", flush=True)
            if where[-1] == OURS:
                self.failures.append(text)

    def _prepare_all(self, case, peers, inputs, which):
        candidates = []
        for name, peer in peers.items():
            with self.reporting(case.op, case.shape, name):
                candidates.append(self._prepare(name, run_pass(peer, inputs, which)))
        for name, prepare in case.lower_bounds.items():
            with self.reporting(case.op, case.shape, name):
                candidates.append(self._prepare(name, prepare(*inputs)[which]))
        return candidates

    def _prepare(self, name, call):
        for _ in range(3):
            call()
        peak, launches = self.clock.peak_bytes(call), self.clock.launches(call)
        replay, timed = self.clock.capture(call)
        return Candidate(name, call, replay, timed, launches, peak)

    def _sample(self, candidates):
        """Sample all candidates interleaved until the time is up; return the samples."""
        samples = [(candidate, [], []) for candidate in candidates]
        start = time.perf_counter()
        for count in range(MAX_SAMPLES):
            seconds = time.perf_counter() - start
            is_long = seconds > LONG_FACTOR * self.seconds
            enough = MIN_LONG_SAMPLES if is_long else MIN_SAMPLES
            if count >= enough and seconds > self.seconds:
                break
            for candidate, gpu, wall in samples:
                gpu.append(self.clock.gpu_seconds(candidate.replay))
                wall.append(self.clock.wall_seconds(candidate.call))
        return samples

    def _collect(self, case, which, work, samples, checks):
        roofline = work.roofline(*self.peaks)
        medians = {candidate.name: statistics.median(gpu) for candidate, gpu, _ in samples}
        others = [medians[name] for name in checks if name in medians and name != OURS]
        for candidate, gpu, wall in samples:
            low, middle, high = _spread(gpu)
            checked = checks.get(candidate.name)
            row = {
                "op": case.op,
                "shape": case.shape,
                "dtype": _short(case.dtype),
                "pass": which,
                "peer": candidate.name,
                "gpu_us": _micro(middle),
                "p20_us": _micro(low),
                "p80_us": _micro(high),
                "wall_us": _micro(statistics.median(wall)),
                "floor_us": _micro(roofline),
                "floor_over_time": f"{roofline / middle:.3f}",
                "best_other_over_time": f"{min(others) / middle:.3f}" if others else "",
                "peak_mib": f"{candidate.peak / 2**20:.1f}" if candidate.peak != "" else "",
                "launches": candidate.launches,
                "error": f"{checked.error:.2e}" if checked else "",
                "bit_equal": checked.is_reproducible if checked else "",
                "timed": candidate.timed,
                "samples": len(gpu),
            }
            self.rows.append(row | self._environment())
        print_rows(self.rows[len(self.rows) - len(samples) :])

    def _environment(self):
        copy, gemm = self.peaks
        return {
            "run": self.started,
            "copy_tb_s": f"{copy / 1e12:.3f}",
            "gemm_tflop_s": f"{gemm / 1e12:.1f}",
            "triton": _version("triton"),
            "liger": _version("liger-kernel"),
        }


def file_names(only):
    """Return the names of the files in benchmarks/ops, all or the selected ones."""
    known = sorted(path.stem for path in (HERE / "ops").glob("*.py"))
    names = only.split(",") if only else known
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise SystemExit(f"--only {name} is not known. Known: {', '.join(known)}.{hint}")
    return names


def main(arguments):
    """Run all cases, then write the results; return the exit code."""
    names = file_names(arguments.only)
    gc.collect()
    gc.freeze()  # collections free the memory of graphs, and need not visit the imports
    clock = make_clock()
    seconds = arguments.seconds_per_case
    if arguments.quick:
        seconds = 0.2
        # torch.compile would tune its own GEMM kernels for minutes, and choose cuBLAS.
        torch._inductor.config.max_autotune_gemm_backends = "ATEN"
    bench = Bench(clock, seconds, arguments.without.split(","))
    copy, gemm = bench.peaks
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 GEMM {gemm / 1e12:.0f} TFLOP/s", _power())
    on_stream = torch.cuda.stream(clock.stream) if clock.stream else contextlib.nullcontext()
    with on_stream:
        for name in names:
            run_file(bench, name, arguments)
    if not (bench.rows or bench.failures):
        raise SystemExit(f"--shape {arguments.shape!r} is in no case of {', '.join(names)}")
    print("at the end:", _power())
    plot(bench.rows, arguments.out / "ops.png")
    for failure in bench.failures:
        print(f"FAILED {failure}")
    return 1 if bench.failures else 0


def run_file(bench, name, arguments):
    """Run the cases of one file and record each at once: a later one may crash."""
    with bench.reporting(name, OURS):
        module = importlib.import_module(f"ops.{name}")
        for case in module.TINY if arguments.tiny else module.CASES:
            if arguments.shape not in f"{case.op} {case.shape}":
                continue
            before = len(bench.rows)
            with bench.reporting(case.op, case.shape, OURS):
                bench.run_case(case)
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


def print_rows(rows):
    """Print one pass of a case, one line per peer."""
    for row in sorted(rows, key=lambda row: float(row["gpu_us"])):
        cells = [f"{str(row[column]):>9}" for column in COLUMNS]
        marks = "" if row["timed"] != "events" else " events"
        marks += " differs from run to run" if row["bit_equal"] is False else ""
        print("  " + " ".join(cells) + marks, flush=True)


def plot(rows, path):
    """Plot roofline / time of the longest pass of every case, one bar per peer."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    cases = {}
    for row in rows:
        passes = cases.setdefault(f"{row['op']} {row['shape']}", {})
        passes.setdefault(row["pass"], {})[row["peer"]] = float(row["floor_over_time"])
    bars = {
        name: passes.get("full") or next(iter(passes.values())) for name, passes in cases.items()
    }
    peers = sorted({peer for shares in bars.values() for peer in shares})
    figure = Figure(figsize=(9, 1 + 0.22 * sum(len(shares) + 1 for shares in bars.values())))
    axes = figure.add_subplot()
    position, ticks = 0, []
    for name, shares in bars.items():
        ticks.append((position + (len(shares) - 1) / 2, name))
        for peer, share in sorted(shares.items(), key=lambda item: item[1]):
            axes.barh(position, share, color=f"C{peers.index(peer)}")
            axes.text(share, position, f" {peer}", va="center", fontsize=7)
            position += 1
        position += 1
    axes.set_yticks([tick for tick, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("roofline / time: 1 is the memory bandwidth or the GEMM throughput")
    figure.savefig(path, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", default="", help="files of benchmarks/ops, comma-separated")
    parser.add_argument("--shape", default="", help="cases with this in their name and shape only")
    parser.add_argument("--without", default="", help="peers to skip, e.g. compile,liger")
    parser.add_argument("--quick", action="store_true", help="few samples")
    parser.add_argument("--seconds-per-case", type=float, default=2.0, help="of one pass")
    parser.add_argument("--tiny", action="store_true", help="the tiny cases, e.g. on a cpu")
    parser.add_argument(
        "--out", type=Path, help="folder for the results; they are kept without it, but tiny ones"
    )
    given = parser.parse_args()
    if given.out is None:
        given.out = Path(tempfile.mkdtemp()) if given.tiny else HERE / "results"
    sys.exit(main(given))
