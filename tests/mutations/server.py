"""Runs pytest again and again in forks of one process that has imported torch, and nothing of ours.

Three quarters of a short test run are imports, and most of these are not of the code under test.
Each line read is a JSON list of pytest's arguments and a file for the output; two lines are
written for each: the process that runs it, then its exit code.
"""

import importlib
import json
import os
import sys

# Nothing that a kernel's interpreter, the adaptor or a facade wants to be there before.
PRELOADED = (
    "numpy",
    "torch",
    "torch.distributed._tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "hypothesis.strategies",
    "pydantic",
    "pytest",
    "yaml",
)


def serve() -> None:
    """Answer until the input ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        arguments, output = json.loads(line)
        process = os.fork()
        if not process:
            os._exit(_run(arguments, output))
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(arguments: list[str], output: str) -> int:
    import pytest

    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(number, target)
    # Text wrappers of the server's streams, which its own answers go through, stay the server's.
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
    sys.argv = ["pytest", *arguments]
    try:
        return int(pytest.main(arguments))
    except BaseException as error:  # noqa: BLE001 (a fork must not go on as the server)
        print(repr(error))
        return 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as `python -m pytest` has it; the tests' own modules come from here
    serve()
