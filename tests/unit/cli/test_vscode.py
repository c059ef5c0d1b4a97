"""The launch file for VS Code: what is written, what is kept, what is refused."""

import json
from pathlib import Path

import pytest

from mindspeed.cli.debug import write_launch_file
from mindspeed.cli.main import main
from mindspeed.config import ConfigError


def test_a_new_file_has_one_entry_per_rank(tmp_path: Path) -> None:
    path = tmp_path / ".vscode" / "launch.json"
    write_launch_file(path, 2)
    settings = json.loads(path.read_text())
    assert settings["version"] == "0.2.0"
    assert settings["configurations"] == [
        {
            "name": f"Attach to Worker {rank}",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": "localhost", "port": port},
            "pathMappings": [{"localRoot": "${workspaceFolder}", "remoteRoot": "."}],
        }
        for rank, port in ((0, 22333), (1, 22334))
    ]
    assert settings["compounds"] == [
        {
            "name": "Attach to all workers",
            "configurations": ["Attach to Worker 0", "Attach to Worker 1"],
        }
    ]


def test_only_our_entries_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    mine = {"name": "Attach to Worker", "type": "node"}
    path.write_text(json.dumps({"version": "9", "inputs": [1], "configurations": [mine]}))
    write_launch_file(path, 4)
    write_launch_file(path, 1)
    settings = json.loads(path.read_text())
    assert (settings["version"], settings["inputs"]) == ("9", [1])
    names = [entry["name"] for entry in settings["configurations"]]
    assert names == ["Attach to Worker", "Attach to Worker 0"]
    assert settings["compounds"][0]["configurations"] == ["Attach to Worker 0"]


@pytest.mark.parametrize("text", ['{"version": "0.2.0", // mine\n}', "[1]", '{"compounds": {}}'])
def test_what_cannot_be_merged_is_refused_or_backed_up(text: str, tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--force replaces the file"):
        write_launch_file(path, 1)
    assert path.read_text() == text and len(list(tmp_path.iterdir())) == 1
    backup = write_launch_file(path, 1, force=True)
    assert backup is not None and backup.read_text() == text
    assert len(json.loads(path.read_text())["configurations"]) == 1
    path.write_text("again not JSON")
    second = write_launch_file(path, 1, force=True)
    assert backup.read_text() == text and second is not None and second != backup


def test_the_command_writes_to_the_given_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["debug", "--vscode", "3"]) == 0
    assert "3 ranks on ports 22333 to 22335" in capsys.readouterr().out
    assert main(["debug", "--vscode", "3", "--output", "other.json"]) == 0
    assert Path("other.json").read_text() == Path(".vscode/launch.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vscode", "0"], "--vscode 0: give the number of ranks, 1 to"),
        (["--vscode", "2", "--output", "."], "is a folder"),
        (["--vscode", "2", "--output", "file/launch.json"], "cannot write file/launch.json"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["debug", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
