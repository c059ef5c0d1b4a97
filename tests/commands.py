"""Commands as the documents show them, in processes forked from one that has their imports.

A command of its own process spends five seconds of a core on imports; here it starts at once. What
launchers, signals and the entry scripts themselves do is tested with real processes.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from mindspeed.launch import call
from tests import forked

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "preprocess_data.py": ["mindspeed-llm", "preprocess"],
    "convert_ckpt.py": ["mindspeed-llm", "convert"],
    "pretrain_gpt.py": ["mindspeed-llm", "pretrain"],
    "posttrain_gpt.py": ["mindspeed-llm", "posttrain"],
    "inference.py": ["mindspeed-llm", "generate"],
    "pretrain_transformers.py": ["mindspeed-mm", "train"],
    "pretrain_vlm.py": ["mindspeed-mm", "train"],
}
"""The entry scripts of the root, and the commands that they are."""


def run_command(
    *words: str,
    nproc: int = 1,
    folder: Path = ROOT,
    said: str = "",
    variables: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> tuple[int, str]:
    """Run a command, or a script, as ranks in a folder; return the exit code and the output.

    `said` is its standard input; `variables` are added to the environment of a rank.
    """
    arguments = (words, str(folder), said, variables or {})
    with contextlib.redirect_stdout(io.StringIO()) as output:
        codes = call(_run, nproc, *arguments, timeout=timeout, preload=["tests.preload"])
    return max(codes), output.getvalue()


def run_page(page: Path, folder: Path, change: Callable[[str], str] = str) -> None:
    """Run every command of a page's bash blocks, each changed by a function, in a folder."""
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").strip().splitlines():
            words, nproc = shlex.split(change(line)), 1
            if words[:3] == ["mindspeed", "run", "--nproc"]:
                words, nproc = ["python", *words[4:]], int(words[3])
            code, output = run_command(*words, nproc=nproc, folder=folder)
            assert code == 0, f"{line}\n{output}"


def _run(words: tuple[str, ...], folder: str, said: str, variables: Mapping[str, str]) -> int:
    os.chdir(folder)
    os.environ.update(variables)
    sys.stdin = io.StringIO(said)
    program, *rest = words
    if program != "python":
        return forked.command(list(words))
    if rest[0] in SCRIPTS:
        sys.argv = rest
        return forked.command([*SCRIPTS[rest[0]], *rest[1:]])
    sys.argv = rest
    sys.path.insert(0, str(Path(rest[0]).resolve().parent))
    try:
        runpy.run_path(rest[0], run_name="__main__")
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    return 0
