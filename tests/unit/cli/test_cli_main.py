"""The command: finds its sub-commands, exits with 2 on misuse, suggests the nearest word."""

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.cli import main as command
from mindspeed.cli.main import REQUIRED, commands, main

ROOT = Path(__file__).resolve().parents[3]

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "mindspeed", *words], capture_output=True, text=True, timeout=240
    )


def test_python_dash_m_and_help():
    done = run("--help")
    assert done.returncode == 0
    assert "usage: mindspeed" in done.stdout
    for name in ("features", "report"):
        assert f"    {name} " in done.stdout


@pytest.mark.parametrize("package", ["mindspeed", "mindspeed_llm", "mindspeed_mm"])
def test_the_help_of_all_commands_imports_no_torch(package):
    script = f"""
import sys
from {package}.cli.main import main
try:
    main(["--help"])
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_characters_that_a_terminal_lacks_are_replaced():
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_llm", "preprocess", "--help"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "(default: ??)" in done.stdout, done.stderr


def test_the_version_is_that_of_what_is_installed(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    torch = importlib.metadata.version("torch")
    assert f", torch {torch}, megatron-core " in capsys.readouterr().out


def test_without_a_command_the_help_goes_to_stderr(capsys):
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "features" in captured.err


@pytest.mark.parametrize(
    "words, prog",
    [
        (["preprocess_data.py", "--input", "x.jsonl"], "mindspeed-llm"),
        (["pretrain_vlm.py"], "mindspeed-mm"),
        (["-m", "mindspeed", "doctor"], "mindspeed"),
        (["-m", "mindspeed_llm", "plot"], "mindspeed-llm"),
        (["-m", "mindspeed_mm", "plan"], "mindspeed-mm"),
    ],
)
def test_a_python_without_packages_is_named_in_one_line(words, prog):
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", *words]  # -S: without the packages that are installed
    done = subprocess.run(command, env=plain, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{prog}: error: {sys.executable} has no ")
    assert line.endswith("or pip install -e '.[llm,mm]' into this one")


def test_packages_that_a_command_misses_by_name_are_those_of_the_distribution():
    for line in importlib.metadata.requires("mindspeed"):
        if "extra" not in line or re.search(r"extra == .(llm|mm)\b", line):
            files = importlib.metadata.files(re.match(r"[\w-]+", line)[0])
            found = {file.parts[0].partition(".")[0] for file in files}
            assert found & REQUIRED, line


def test_every_file_is_a_command():
    files = {name.removesuffix(".py") for name in os.listdir(os.path.dirname(command.__file__))}
    found = {module.__name__.rpartition(".")[2] for module in commands()}
    assert found == {name for name in files if not name.startswith("__")} - {"main", "progress"}


@pytest.mark.parametrize(
    "words, hint",
    [
        (["featrues"], "featrues: did you mean features?"),
        (["features", "--jsn"], "--jsn: did you mean --json?"),
        (["--hlep"], "--hlep: did you mean --help?"),
        (["report", "--use-fused-swigul"], "did you mean --use-fused-swiglu?"),
    ],
)
def test_misuse(words, hint, capsys):
    with pytest.raises(SystemExit) as exit:
        main(words)
    assert exit.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(hint)


def test_config_error_is_one_line(capsys):
    assert main(["report", "--config", "/nowhere/run.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "mindspeed: error: /nowhere/run.yaml: cannot be read (No such file or directory): "
        "give a YAML file\n"
    )


def test_a_device_that_is_not_there_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("MINDSPEED_DEVICE", "gpu")
    said = "error: MINDSPEED_DEVICE=gpu is not a device: use cpu, cuda, npu\n"
    assert main(["doctor", "--memory", "--num-layers", "2"]) == 2
    assert capsys.readouterr().err == f"mindspeed: {said}"
    flags = "posttrain --load x --data-path x --lr 1e-5 --train-iters 1".split()
    command = [sys.executable, "-m", "mindspeed_llm", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == f"mindspeed-llm: {said}"


def test_a_python_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr("sys.version_info", (3, 9, 18))
    with pytest.raises(ImportError, match="needs Python 3.10 to 3.12: .* is 3.9"):
        runpy.run_path(str(ROOT / "mindspeed" / "__init__.py"))


def test_interrupt_is_quiet(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdout", type("Stdout", (), {"write": interrupted})())
    assert main(["features", "--json"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_unbuffered", [False, True], ids=["buffered", "unbuffered"])
def test_a_reader_that_leaves_is_no_error(is_unbuffered):
    # Both with and without the buffer that is written at the end.
    unbuffered = {"PYTHONUNBUFFERED": "1"} if is_unbuffered else {}
    pipe = f"{sys.executable} -m mindspeed features | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", pipe], env=BUFFERED | unbuffered, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


ENDS = """
import atexit, ctypes, sys, threading, time, types
from mindspeed.cli.main import exit_process

class Module:
    def __del__(self):
        print("unloaded")

def late():
    time.sleep(0.1)
    print("joined")

module = Module()
module.itself = module  # Python finds it only when it unloads everything
torch = types.SimpleNamespace(accelerator=types.SimpleNamespace(is_available=lambda: {accelerated}))
sys.modules["torch"] = torch
atexit.register(lambda: print("handled"))
threading.Thread(target=late).start()
ctypes.CDLL(None).puts(b"by the C library")
exit_process(3)
"""


@pytest.mark.parametrize("accelerated", [False, True])
def test_a_process_exits_with_all_its_output_and_unloads_nothing(accelerated):
    code = ENDS.format(accelerated=accelerated)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (3, "")
    unloaded = ["unloaded"] if accelerated else []
    assert sorted(done.stdout.splitlines()) == sorted(
        ["joined", "handled", "by the C library", *unloaded]
    )


ENDS_AT_ONCE = """
import sys, threading, types
from mindspeed.cli.main import exit_process
accelerator = types.SimpleNamespace(is_available=lambda: False)
sys.modules["torch"] = types.SimpleNamespace(accelerator=accelerator)
{before}
exit_process(3)
"""
INTERRUPTED = """
def interrupted(original=threading._shutdown):
    threading._shutdown = original
    raise KeyboardInterrupt
threading._shutdown = interrupted
"""


@pytest.mark.parametrize("observer", ["cProfile", "trace"])
def test_a_profiler_reports_when_a_process_exits(observer, tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(ENDS_AT_ONCE.format(before=""))
    options = ["-l", "-C", str(tmp_path)] if observer == "trace" else []
    command = [sys.executable, "-m", observer, *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    said = "functions called:" if observer == "trace" else "function calls"
    assert said in done.stdout, done.stderr


def test_an_interrupt_while_threads_are_joined_ends_the_process():
    code = ENDS_AT_ONCE.format(before=INTERRUPTED)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (3, "")


def test_output_that_cannot_be_written_is_an_error_of_the_exit():
    code = ENDS.format(accelerated=False)
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env=BUFFERED, stdout=full, stderr=subprocess.PIPE, timeout=240
        )
    assert done.returncode == 120 and b"No space left on device" in done.stderr
