"""Reward functions: what they get, and one clear line for everything that can go wrong."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.rewards import worker
from mindspeed_llm.rewards.function import RewardFunction
from tests.sockets import running

CALL = (["ask"], ["answer"], {})
PATIENCE = 120.0
"""Seconds for what takes a moment on an idle machine."""


def make(folder: Path, body: str, timeout: float = PATIENCE, name: str = "f") -> RewardFunction:
    path = folder / "rewards.py"
    path.write_text(body)
    return RewardFunction(f"{path}:{name}", timeout)


def give_a_second(function: RewardFunction) -> None:
    """Let the calls from here on take one second: its process has started, however long it took."""
    function._timeout = 1.0
    function._channel.settimeout(1.0)


def test_it_gets_texts_and_fields(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("BONUS = 1\n")
    body = (
        "from beside import BONUS\n"
        "def f(prompts, completions, answer, **others):\n"
        "    print('for the log')\n"
        "    assert prompts == ['2+2', 'x'] and others == {'level': [1, None]}\n"
        "    return [BONUS * (c == a) for c, a in zip(completions, answer)]\n"
    )
    function = make(tmp_path, body)
    fields = {"answer": ["4", "\u00e9"], "level": [1, None]}
    for _ in range(2):
        assert function(["2+2", "x"], ["4", "e"], fields) == {"": [1.0, 0.0]}
    function.close()


def test_the_folder_of_a_file_is_searched_only_while_it_runs(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("BONUS = 1\n")
    path = tmp_path / "engine.py"
    path.write_text("from beside_it import BONUS\ndef f(): return BONUS\n")
    before = list(sys.path)
    assert worker.load(str(path), "f", "engine_of_a_test")() == 1
    assert sys.path == before


def test_it_may_import_when_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("BONUS = 2\n")
    function = make(tmp_path, "def f(**x):\n    from beside import BONUS\n    return [BONUS]\n")
    assert function(*CALL) == {"": [2.0]}
    function.close()


def test_it_may_name_the_parts_of_rewards(tmp_path: Path) -> None:
    body = (
        "import array\n"
        "def f(prompts, completions):\n"
        "    return {'right': [1] * len(prompts), 'brief': array.array('f', [0.5])}\n"
    )
    function = make(tmp_path, body)
    assert function(*CALL) == {"right": [1.0], "brief": [0.5]}
    function.close()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def f(**x): return [1.0, 2.0]", "returned 2 rewards for 1 completions"),
        ("def f(**x): pass", "TypeError: returned None: return a list with a number for each"),
        ("def f(**x): return [float('nan')]", "the reward of 'answer' is nan: rewards must be"),
        ("def f(**x):\n    raise ValueError('no\\nway')", "ValueError (line 2): no way"),
        ("def f(**x): return 3", "TypeError"),
        ("def f(**x): return ['one']", "returned ['one']: return a list with a number for each"),
        ("def f(**x): return '1'", "returned '1': return a list with a number for each"),
        ("def f(**x): return ['1.0']", "returned ['1.0']: return a list with a number for each"),
        ("def f(**x): return {1.0: 'answer'}", "returned {1.0: 'answer'}: return a list"),
        ("def f(**x): return {1: [1.0]}", "or a dict of such lists by name"),
        ("def f(**x): return {'': [1.0]}", "or a dict of such lists by name"),
        ("def f(**x): return {}", "returned {}: return a list with a number"),
        ("def f(**x): return {'right': 1.0}", "returned {'right': 1.0}: return a list"),
        ("def f(**x): return {'a': [1.0], 'b': []}", "0 rewards of 'b' for 1 completions"),
        ("def f(**x): return {'a': [float('inf')]}", "the reward of 'a' of 'answer' is inf"),
        ("def f(): return [1]", "TypeError"),
        ("import sys\ndef f(**x): sys.exit(3)", "SystemExit"),
        ("import os\ndef f(**x): os._exit(3)", "its process ended with exit code 3"),
    ],
)
def test_a_call_that_fails_is_one_line(tmp_path: Path, body: str, expected: str) -> None:
    function = make(tmp_path, body)
    assert expected in call_refused(function)
    function.close()


def test_a_call_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    function = make(tmp_path, "def f(**x):\n    while True: pass")
    give_a_second(function)
    assert "did not answer within 1 s and was ended" in call_refused(function)
    assert function._process.returncode == -signal.SIGKILL


def call_refused(function: RewardFunction) -> str:
    """Call it; return its error, which is one line."""
    with pytest.raises(ConfigError) as error:
        function(*CALL)
    text = str(error.value)
    assert text.startswith("--reward-fn ") and "\n" not in text
    return text


@pytest.mark.parametrize(
    ("body", "timeout", "expected"),
    [
        ("def g(): pass", PATIENCE, "has no function f; it has g"),
        ("import nothing_like_this", PATIENCE, "ModuleNotFoundError (line 1)"),
        ("def f(:", PATIENCE, "SyntaxError"),
        ("import time; time.sleep(60)", 1.0, "was not loaded within 1 s"),
    ],
)
def test_a_file_that_cannot_be_used(
    tmp_path: Path, body: str, timeout: float, expected: str
) -> None:
    with pytest.raises(ConfigError, match="--reward-fn") as error:
        make(tmp_path, body, timeout)
    assert expected in str(error.value)


@pytest.mark.parametrize("spec", ["rewards.py", "missing.py:f", ":f", "rewards.py:1"])
def test_a_wrong_name(spec: str) -> None:
    with pytest.raises(ConfigError, match="--reward-fn"):
        RewardFunction(spec, 1.0)


def test_a_large_batch_to_a_function_that_reads_nothing(tmp_path: Path) -> None:
    function = make(tmp_path, "def f(**x):\n    import time; time.sleep(60)")
    give_a_second(function)
    with pytest.raises(ConfigError, match="did not answer within 1 s"):
        function([""], ["x" * (8 << 20)], {})


def test_signals_that_stop_the_run_do_not_end_it(tmp_path: Path) -> None:
    function = make(tmp_path, "def f(**x): return [1]")
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(function._process.pid, number)
    assert function(*CALL) == {"": [1.0]}
    function.close()


def test_what_a_function_starts_is_ended_with_it(tmp_path: Path) -> None:
    body = (
        "import subprocess\n"
        "children = []\n"
        "def f(**x):\n"
        "    if children: children[0].wait()\n"
        "    children.append(subprocess.Popen(['sleep', '1000']))\n"
        "    return [children[0].pid]\n"
    )
    function = make(tmp_path, body)
    (pid,) = map(int, function(*CALL)[""])
    give_a_second(function)
    with pytest.raises(ConfigError, match="did not answer within 1 s"):
        function(*CALL)
    deadline = time.monotonic() + PATIENCE
    while running(pid):
        assert time.monotonic() < deadline, f"process {pid} is left"
        time.sleep(0.05)


def test_closing_ends_the_process(tmp_path: Path) -> None:
    function = make(tmp_path, "def f(**x): return [1]")
    pid = function._process.pid
    function.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
