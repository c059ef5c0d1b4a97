"""The numbers of a load of experts, its table in a log, and its heat map."""

import json
import logging
import math

import pytest

from mindspeed.moe.load import LayerLoad, LoadMonitor, by_layer, summary
from mindspeed.moe.load_table import LoadTable
from mindspeed.training.log import TrainingLog
from mindspeed_llm.cli.main import main

EVEN = LayerLoad(1, (50, 50, 50, 50), 200)
SKEWED = LayerLoad(3, (300, 0, 90, 10), 500)


def test_numbers():
    assert (EVEN.entropy, EVEN.drop_rate, EVEN.shares) == (1.0, 0.0, [1.0] * 4)
    assert SKEWED.drop_rate == pytest.approx(0.2)
    assert SKEWED.shares == [3.0, 0.0, 0.9, 0.1]
    parts = (0.75, 0.225, 0.025)
    assert SKEWED.entropy == pytest.approx(-sum(p * math.log(p) for p in parts) / math.log(4))
    assert LayerLoad(1, (7, 0), 7).entropy == 0
    assert SKEWED.starving == [1] and LayerLoad(1, (30, 0), 30).starving == []
    found = summary([EVEN, SKEWED])
    assert found["moe max load"] == 3 and found["moe min load"] == 0
    assert found["moe drop rate"] == pytest.approx(0.1)
    assert by_layer([SKEWED])["moe max load/layer 3"] == 3


def test_starving_experts_are_named_once(caplog):
    monitor = LoadMonitor([], 4)
    with caplog.at_level(logging.WARNING):
        monitor.warn_once([EVEN], 10)
        assert not caplog.records
        monitor.warn_once([EVEN, SKEWED], 20)
        monitor.warn_once([EVEN, SKEWED], 30)
    [record] = caplog.records
    assert "at iteration 20 in layers 3; in layer 3 experts 1 get" in record.getMessage()


@pytest.mark.parametrize(
    ("given", "is_biased", "words"),
    [
        ({}, False, "the auxiliary loss"),
        ({}, True, "raise --moe-router-bias-update-rate"),
        ({"freeze_router": True}, True, "routers are frozen"),
        ({"lora_r": 8}, False, "routers are frozen"),
        ({"lora_r": 8, "lora_train_router": True}, False, "the auxiliary loss"),
    ],
)
def test_the_advice_is_for_the_routers_that_there_are(caplog, given, is_biased, words):
    from mindspeed_llm.training.expert_load import load_advice
    from mindspeed_llm.training.options import TrainOptions

    advice = load_advice(TrainOptions(**given), is_biased=is_biased)
    LoadMonitor([], 4).warn_once([SKEWED], 1, advice)
    kinds = ("the auxiliary loss", "raise --moe-router-bias-update-rate", "routers are frozen")
    assert [each for each in kinds if each in caplog.text] == [words]


def write_log(folder):
    log = TrainingLog(
        interval=1, total=9, global_batch=1, is_writer=True, file=folder / "log.jsonl"
    )
    log.start(0)
    for iteration, load in ((1, EVEN), (2, SKEWED)):
        table = LoadTable(iteration, [load.layer], [load.shares])
        log.add_report(iteration, "expert load", summary([load]), {}, table.fields())


def test_the_heat_map_shows_the_last_report(tmp_path, capsys):
    write_log(tmp_path)
    assert main(["plot", str(tmp_path), "--experts", "--png", str(tmp_path / "map.png")]) == 0
    title, row, _ = capsys.readouterr().out.splitlines()
    assert "4 experts at 2" in title
    assert row == "  layer 3 |█ ▄ | 0.00 to 3.00"
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", str(tmp_path), "--key", "moe max load"]) == 0
    assert "1 at 1, 3 at 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"iteration": 1, "lm loss": 2.0}, "no load of experts"),
        ({"iteration": 1, "moe layers": [1], "moe load": [[1.0], [1.0]]}, "not a table"),
        ({"iteration": 1, "moe layers": [1], "moe load": [["1"]]}, "not a table"),
        ({"iteration": 1, "moe load": 3}, "not a table"),
    ],
)
def test_logs_without_a_table_are_refused(tmp_path, capsys, line, said):
    (tmp_path / "log.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["plot", str(tmp_path), "--experts"]) == 2
    assert said in capsys.readouterr().err


def test_a_heat_map_has_no_key(tmp_path, capsys):
    assert main(["plot", str(tmp_path), "--experts", "--key", "lm loss"]) == 2
    assert "drop --key" in capsys.readouterr().err
