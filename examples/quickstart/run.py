"""Run the commands of a page, one after the other, as a reader would type them."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the bash blocks of a page, each with the title above it."""
    parts = re.findall(r"^## ([^\n]*)\n|^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    found, title = [], ""
    for heading, commands in parts:
        title = heading or title
        if commands:
            found.append((title, commands))
    return found


def main() -> int:
    """Run all blocks; stop at the first that fails and say how to go on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", nargs="?", type=Path, default=HERE / "README.md")
    parser.add_argument("--out", help="folder for all output (default: the one of the page)")
    args = parser.parse_args()
    shown = f"out/{args.page.resolve().parent.name}"
    console = Console(highlight=False)
    # python and mindspeed are those of this environment, in an activated shell or not.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    began = time.perf_counter()
    for title, commands in blocks(args.page.read_text(encoding="utf-8")):
        commands = commands.replace(shown, args.out or shown)
        console.rule(title, align="left")
        console.print(commands.rstrip(), style="dim", markup=False, soft_wrap=True)
        done = subprocess.run(
            ["bash", "-e", "-c", commands], cwd=ROOT, env={**os.environ, "PATH": path}
        )
        if done.returncode:
            console.print(f'Step "{title}" failed. The commands above can be run alone.')
            return done.returncode
    console.print(f"\nAll done in {time.perf_counter() - began:.0f} s.")
    if shutil.which("mindspeed") is None:
        activate = Path(sys.prefix) / "bin" / "activate"
        console.print(f"For commands of your own: source {activate}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
