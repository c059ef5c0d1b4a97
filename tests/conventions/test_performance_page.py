"""The numbers of docs/performance.md are those of the results."""

import csv
import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("page", ROOT / "scripts" / "performance_page.py")
page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(page)


def test_the_page_is_what_the_script_writes():
    text = page.PAGE.read_text()
    assert text == page.render(text), "run python scripts/performance_page.py"


def race(peers, shape="8x4", which="full", commit="abc"):
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
            "device": "NVIDIA H200",
            "run": commit,
            "commit": commit,
        }
        for peer, time in peers.items()
    ]


def test_the_last_race_of_a_shape_counts(tmp_path):
    rows = race({"ours": 25.0, "eager": 20.0}, commit="old")
    rows += race({"liger": 40.0, "eager": 1234.0, "ours": 12.5})
    rows += race({"ours": 50.0, "eager": 60.0}, which="fwd")
    with (tmp_path / "ops.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    text = page.render("a\n<!-- table: ops -->\nstale\n<!-- end -->\nb\n", tmp_path)
    assert "stale" not in text and "old" not in text
    assert "Measured on: NVIDIA H200; commit abc." in text
    assert "| 8x4 | full | 12.5 (2) | 1,234 (2) | 40.0 (2) | 10.0 | 0.800 | 3.200 |" in text
    assert "| 8x4 | fwd | 50.0 (2) | 60.0 (2) | - | 10.0 | 0.200 | 1.200 |" in text


def test_what_was_not_measured_is_told(tmp_path):
    text = page.render("<!-- table: train_step -->\n<!-- end -->\n", tmp_path)
    assert "Not measured yet" in text and page.render(text, tmp_path) == text
