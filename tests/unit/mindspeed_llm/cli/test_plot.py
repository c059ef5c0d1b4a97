"""The curve of a training log: read, drawn in characters and as a picture."""

import json
import sys

import pytest

from mindspeed_llm.cli.main import main
from mindspeed_llm.cli.plot import HEIGHT, WIDTH, draw, read


@pytest.fixture
def log(tmp_path):
    lines = [
        {"iteration": n, "lm loss": loss} for n, loss in ((1, 4.0), (2, float("nan")), (3, 2.0))
    ]
    lines.insert(2, {"iteration": 2, "validation loss": 5.0})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_a_number_by_iteration_without_what_is_not_finite(log):
    assert read(log, "lm loss") == read(log) == ("lm loss", [(1, 4.0), (3, 2.0)])
    assert read(log / "log.jsonl", "validation loss") == ("validation loss", [(2, 5.0)])


def test_the_highest_is_a_full_column_and_the_lowest_is_seen():
    title, *rows = draw([(1, 4.0), (2, 3.0), (3, 2.0)], "lm loss")
    assert title == "lm loss: 4 at 1, 2 at 3"
    wide = WIDTH // 3
    columns = list(zip(*(row.partition("|")[2].ljust(WIDTH) for row in rows)))
    assert columns[0] == tuple("█" * HEIGHT)
    assert columns[wide] == (" ",) * (HEIGHT // 2) + ("█",) * (HEIGHT // 2)
    assert columns[2 * wide] == (" ",) * (HEIGHT - 1) + ("▁",)
    assert rows[0].split()[0] == "4" and rows[-1].split()[0] == "2"


def test_many_points_are_averaged_and_a_level_curve_is_drawn():
    _, *rows = draw([(n, float(n // WIDTH)) for n in range(WIDTH * WIDTH)], "x")
    assert len(rows[-1].partition("|")[2]) == WIDTH
    assert len(draw([(1, 1.0)], "x")) == HEIGHT + 1


def test_the_command(log, capsys):
    assert main(["plot", str(log), "--png", str(log / "pictures" / "loss.png")]) == 0
    assert (log / "pictures" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "lm loss: 4 at 1, 2 at 3" in capsys.readouterr().out
    assert main(["plot", str(log), "--png", str(log / "loss")]) == 0
    assert (log / "loss").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_made(log, capsys, monkeypatch):
    assert main(["plot", str(log), "--png", str(log)]) == 2
    assert f"--png {log}: cannot be written (Is a directory)" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(log), "--png", str(log / "loss.png")]) == 2
    assert "--png needs matplotlib: pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, arguments, said",
    [
        ('{"iteration": 1, "lm loss": 2.0}\n', ["--key", "lm los"], "did you mean lm loss?"),
        ("hello\n", [], "line 1: is not a line of a training log"),
        ('{"iteration": 1, "lm loss": NaN}\n', [], "nothing to draw"),
        (None, [], "cannot be read"),
    ],
)
def test_bad_input(tmp_path, capsys, content, arguments, said):
    if content is not None:
        (tmp_path / "log.jsonl").write_text(content)
    assert main(["plot", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err
