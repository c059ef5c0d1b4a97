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

CALL = (["ask"], ["answer"], {})


def make(folder: Path, body: str, timeout: float = 10.0, name: str = "f") -> RewardFunction:
    path = folder / "rewards.py"
    path.write_text(body)
    return RewardFunction(f"{path}:{name}", timeout)


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
        assert function(["2+2", "x"], ["4", "e"], fields) == [1.0, 0.0]
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
    assert function(*CALL) == [2.0]
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
        ("def f(): return [1]", "TypeError"),
        ("import sys\ndef f(**x): sys.exit(3)", "SystemExit"),
        ("import os\ndef f(**x): os._exit(3)", "its process ended with exit code 3"),
        ("def f(**x):\n    while True: pass", "did not answer within 1 s and was ended"),
    ],
)
def test_a_call_that_fails_is_one_line(tmp_path: Path, body: str, expected: str) -> None:
    function = make(tmp_path, body, timeout=1.0)
    started = time.monotonic()
    with pytest.raises(ConfigError) as error:
        function(*CALL)
    text = str(error.value)
    assert text.startswith("--reward-fn ") and expected in text and "\n" not in text
    assert time.monotonic() - started < 5
    function.close()


@pytest.mark.parametrize(
    ("body", "name", "expected"),
    [
        ("def g(): pass", "f", "has no function f; it has g"),
        ("import nothing_like_this", "f", "ModuleNotFoundError (line 1)"),
        ("def f(:", "f", "SyntaxError"),
        ("import time; time.sleep(60)", "f", "was not loaded within 1 s"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, body: str, name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match="--reward-fn") as error:
        make(tmp_path, body, 1.0, name)
    assert expected in str(error.value)


@pytest.mark.parametrize("spec", ["rewards.py", "missing.py:f", ":f", "rewards.py:1"])
def test_a_wrong_name(spec: str) -> None:
    with pytest.raises(ConfigError, match="--reward-fn"):
        RewardFunction(spec, 1.0)


def test_a_large_batch_to_a_function_that_reads_nothing(tmp_path: Path) -> None:
    function = make(tmp_path, "def f(**x):\n    import time; time.sleep(60)", timeout=1.0)
    with pytest.raises(ConfigError, match="did not answer within 1 s"):
        function([""], ["x" * (8 << 20)], {})


def test_signals_that_stop_the_run_do_not_end_it(tmp_path: Path) -> None:
    function = make(tmp_path, "def f(**x): return [1]")
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(function._process.pid, number)
    assert function(*CALL) == [1.0]
    function.close()


def test_what_a_function_starts_is_ended_with_it(tmp_path: Path) -> None:
    body = (
        "import subprocess\n"
        "def f(**x):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        f"    open('{tmp_path}/pid', 'w').write(str(child.pid))\n"
        "    child.wait()\n"
    )
    function = make(tmp_path, body, timeout=1.0)
    with pytest.raises(ConfigError, match="did not answer within 1 s"):
        function(*CALL)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is left")


def test_closing_ends_the_process(tmp_path: Path) -> None:
    function = make(tmp_path, "def f(**x): return [1]")
    pid = function._process.pid
    function.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
