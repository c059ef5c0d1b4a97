"""Run the unit tests of a Megatron-LM checkout under the adaptor and write down what passes.

    python scripts/megatron_suite.py CHECKOUT --output results.json
    python scripts/megatron_suite_report.py docs/megatron_suite.md core_v0.16.1=results.json

A test is tried with 1 rank; if it does not pass, with 8, which most are written for, then with 4
and 2, unless it has asked for a number that this is not. It passes if every rank says so. Run it
again to go on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from megatron_inputs import checkout, earlier
from megatron_suite_file import Limits, is_finished, run_at_each_size
from megatron_suite_rank import matches, preload, read_reasons
from megatron_suite_results import ORDER, Results

from mindspeed.launch.process import die_with_parent

LEFT_OUT = Path(__file__).with_name("megatron_suite_left_out.txt")


def main() -> int:
    """Run what is missing and keep every file's results as soon as it ends."""
    options = _options()
    limits = Limits(options.timeout, time.time() + options.stop_after)
    output: Path = options.output[0]
    results: dict[str, Results] = options.output[1]
    _enter(options.checkout)
    left_out = dict(read_reasons(LEFT_OUT))
    files = [
        file
        for file in sorted(map(str, Path("tests/unit_tests").rglob("test_*.py")))
        if any(matches(file, each) for each in options.only)
    ]
    if not files:
        print(f"{options.checkout}/tests/unit_tests: no test file is like {' '.join(options.only)}")
        return 2
    if options.again:
        for test in (test for file in files for test in results.get(file, {}).values()):
            test["tried"] = []
    waiting = [file for file in files if not is_finished(results.get(file), options.ranks)]
    waiting.sort(key=lambda file: _length(file, results.get(file, {})), reverse=True)
    preload()
    context = multiprocessing.get_context("fork")
    bind = die_with_parent(os.getpid())
    with ProcessPoolExecutor(options.jobs, mp_context=context, initializer=bind) as pool:
        running = {
            pool.submit(
                run_at_each_size, file, options.ranks, left_out, limits, results.get(file, {})
            ): file
            for file in waiting
        }
        for done in as_completed(running):
            file = running[done]
            known, seconds = done.result()
            if known or time.time() < limits.deadline:  # some files have no tests
                results[file] = known
                _write(output, results)
            if seconds > 1:  # not one that was still waiting when time was up
                print(f"{seconds:6.0f} s  {file}: {_counts(known)}", flush=True)
    left = sum(not is_finished(results.get(file), options.ranks) for file in files)
    print(f"{left} of {len(files)} files are not finished" if left else "finished")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=checkout, help="folder of Megatron-LM")
    parser.add_argument("--output", type=earlier, default="megatron_suite.json")
    parser.add_argument(
        "--ranks",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 8, 4, 2],
        help="world sizes to try, in this order",
    )
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns of files to run")
    parser.add_argument("--again", action="store_true", help="run what has not passed once more")
    parser.add_argument("--jobs", type=int, default=1, help="files to run at a time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that one test may take")
    parser.add_argument(
        "--stop-after",
        type=float,
        default=float("inf"),
        help="seconds after which to stop and keep what is done",
    )
    return parser.parse_args()


def _enter(checkout: Path) -> None:
    """Make this the process of a single rank in the checkout's folder."""
    sys.path.insert(0, str(checkout))
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    # A download, which Megatron tries at the start of every session, fails here at once.
    nowhere = "http://127.0.0.1:9"
    os.environ.update(HTTP_PROXY=nowhere, HTTPS_PROXY=nowhere, NO_PROXY="localhost,127.0.0.1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # What optimizers of other packages compile would take minutes on a cpu.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Two files skip themselves where this names no container or an old one.
    os.environ.setdefault("NVIDIA_PYTORCH_VERSION", "25.06")
    os.chdir(checkout)


def _length(file: str, results: Results) -> tuple[float, int]:
    """Tell how long a file may take: what it took before, or else how much of it there is."""
    seconds = sum(test.get("seconds", 0) for test in results.values())
    return seconds, Path(file).stat().st_size


def _counts(results: Results) -> str:
    counts = Counter(test["outcome"] for test in results.values())
    return ", ".join(f"{counts[kind]} {kind}" for kind in reversed(ORDER) if counts[kind])


def _write(output: Path, results: dict[str, Results]) -> None:
    """Replace the file as a whole: a reader, or a kill, never sees half of it."""
    part = output.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1, sort_keys=True))
    part.replace(output)


if __name__ == "__main__":
    sys.exit(main())
