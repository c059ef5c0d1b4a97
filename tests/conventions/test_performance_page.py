"""The numbers of docs/performance.md and docs/operators.md are those of the results."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("page", ROOT / "scripts" / "performance_page.py")
page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(page)


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.name)
def test_the_page_is_what_the_script_writes(path):
    text = path.read_text()
    assert text == page.render(text), "run python scripts/performance_page.py"


def test_a_missed_target_says_why():
    assert "missed: |" not in page.PAGES[0].read_text(), "write why into benchmarks/op_targets.csv"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks/results").glob("*.csv")), ids=lambda path: path.name
)
def test_rows_have_their_values_in_the_columns_of_the_header(path):
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            assert None not in row and None not in row.values(), row
            assert row["device"] in ("cpu", "NVIDIA H200"), row
            assert re.match(r"[0-9a-f]{7,}( with local edits)?$", row["commit"]), row


def measurement(peers, shape="8x4", which="full", commit="abc"):
    return [
        {
            "op": "rms_norm",
            "shape": shape,
            "dtype": "bfloat16",
            "pass": which,
            "peer": peer,
            "gpu_us": str(time),
            "floor_us": "10.0",
            "floor_over_time": f"{10 / time:.3f}",
            "best_other_over_time": f"{min(t for p, t in peers.items() if p != 'ours') / time:.3f}",
            "peak_mib": "5.0",
            "launches": "2",
            "error": "" if peer == "GEMMs alone" else "1e-3",
            "device": "NVIDIA H200",
            "run": commit,
            "commit": commit,
        }
        for peer, time in peers.items()
    ]


def write(rows, path):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_the_last_measurement_of_a_shape_counts(tmp_path):
    rows = measurement({"ours": 25.0, "eager": 20.0}, commit="old")
    rows += measurement({"liger": 40.0, "eager": 1234.0, "ours": 12.5})
    rows += measurement({"ours": 50.0, "eager": 60.0}, which="fwd")
    write(rows, tmp_path / "ops.csv")
    text = page.render("a\n<!-- table: ops -->\nstale\n<!-- end -->\nb\n", tmp_path)
    assert "stale" not in text and "old" not in text
    assert "Measured on: NVIDIA H200; commit abc." in text
    assert "| 8x4 | full | 12.5 (2) | 1,234 (2) | 40.0 (2) | 10.0 | 0.800 | 3.200 |" in text
    assert "| 8x4 | fwd | 50.0 (2) | 60.0 (2) | - | 10.0 | 0.200 | 1.200 |" in text


def test_gemms_alone_have_a_share_of_ours(tmp_path):
    write(measurement({"ours": 20.0, "eager": 30.0, "GEMMs alone": 15.0}), tmp_path / "ops.csv")
    text = page.render("<!-- table: ops -->\n<!-- end -->\n", tmp_path)
    assert "best other / ours | GEMMs alone / ours |" in text and "| 0.750 |" in text


def test_the_largest_shape_is_shown_for_each_operator(tmp_path):
    rows = measurement({"ours": 2.0, "eager": 1.0}, shape="1x1")
    rows[0]["floor_us"] = rows[1]["floor_us"] = "1.0"
    rows += measurement({"ours": 12.5, "eager": 60.0, "liger": 40.0, "GEMMs alone": 11.0})
    write(rows, tmp_path / "ops.csv")
    text = page.render("<!-- table: op_choices -->\n<!-- end -->\n", tmp_path)
    assert "| rms_norm | 8x4, full | 12.5 | liger 40.0 | 0.800 |" in text and "1x1" not in text


TARGET = {"row": "1", "op": "rms_norm", "pass": "full", "shape": "", "why": "a reason"}


@pytest.mark.parametrize(
    ("target", "cells"),
    [
        ({"against": "roofline", "at_least": "0.40"}, "0.400 | 8x8 | reached"),
        ({"against": "roofline", "at_least": "0.41"}, "0.400 | 8x8 | missed: a reason"),
        ({"against": "roofline", "at_least": "0.41", "shape": "8x4"}, "0.800 | 8x4 | reached"),
        ({"against": "best other", "at_least": "2"}, "1.600 | 8x4 | missed: a reason"),
        ({"against": "liger", "at_least": "2"}, "3.200 | 8x4 | reached"),
        ({"against": "50 us", "at_least": "1"}, "2.000 | 8x8 | reached"),
        ({"against": "4 MiB", "at_least": "1"}, "0.800 | 8x4 | missed: a reason"),
        ({"against": "compile", "at_least": "1"}, "- |  | not measured yet"),
        ({"against": "roofline", "at_least": "1", "pass": "bwd"}, "- |  | not measured yet"),
    ],
)
def test_the_worst_shape_meets_a_target_or_misses_it(tmp_path, monkeypatch, target, cells):
    rows = measurement({"ours": 12.5, "eager": 20.0, "liger": 40.0})
    rows += measurement({"ours": 25.0, "eager": 60.0}, shape="8x8") + measurement(
        {"ours": 1.0, "eager": 1}, "8x4", "fwd"
    )
    write(rows, tmp_path / "ops.csv")
    write([TARGET | target], tmp_path / "targets.csv")
    monkeypatch.setattr(page, "TARGETS", tmp_path / "targets.csv")
    assert cells in page.render("<!-- table: op_targets -->\n<!-- end -->\n", tmp_path)


def test_missing_measurements_are_reported(tmp_path):
    text = page.render("<!-- table: train_step -->\n<!-- end -->\n", tmp_path)
    assert "Not measured yet" in text and page.render(text, tmp_path) == text


def step(peer, tokens, commit, **others):
    names = ("slowest", "fastest", "model_tflops", "peak_gib", "roofline_ratio", "loss")
    row = dict.fromkeys(names, "1") | {"shape": "8b", "peer": peer, "micro_batch": "2"}
    return row | {"tokens_per_s": tokens, "device": "H200", "commit": commit} | others


def test_a_stack_that_was_not_raced_again_is_shown_as_it_was(tmp_path):
    rows = [step("ours", "10", "old"), step("eager", "9", "old"), step("ours-tuned", "8", "old")]
    write([*rows, step("ours", "12", "new")], tmp_path / "train_step.csv")
    text = page.render("<!-- table: train_step -->\n<!-- end -->\n", tmp_path)
    lines = [line for line in text.splitlines() if line.startswith(("| ours", "| eager"))]
    assert [line.split(" | ")[2] for line in lines] == ["12", "9"]
    assert lines[0].endswith("new |") and lines[1].endswith("old |")


def test_the_last_measurement_against_each_peer_is_shown(tmp_path):
    names = ("peer", "against", "milliseconds", "device", "commit")
    compared = [("ours", "fused", "5"), ("fused", "fused", "6"), ("ours", "plain", "5")]
    rows = [dict(zip(names, (*each, "H200", "old"))) for each in compared]
    rows.append(dict(zip(names, ("ours", "plain", "4", "H200", "new"))))
    write(rows, tmp_path / "mm_step.csv")
    text = page.render("<!-- table: mm_step -->\n<!-- end -->\n", tmp_path)
    assert "| ours | fused | 5 | old |" in text and "| ours | plain | 4 | new |" in text
    assert "| ours | plain | 5" not in text
