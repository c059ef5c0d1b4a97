"""A script of its own process, started by the launcher."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Another project on the path may have a package of this name, and would come first: ours has no
# __init__.py.
START = f"""
import sys
import types

sys.path.insert(0, {str(ROOT)!r})
sys.modules["tests"] = types.ModuleType("tests")
sys.modules["tests"].__path__ = [{str(ROOT / "tests")!r}]
"""


def last_lines(folder: Path, script: str, *arguments: object, lines: int = 1) -> list[str]:
    """Run a script on one rank, and return the last lines it printed."""
    path = folder / "script.py"
    path.write_text(START + script)
    command = [sys.executable, "-m", "mindspeed", "run", "--timeout", "240", str(path)]
    done = subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-lines:]
