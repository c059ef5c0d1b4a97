"""Write the tables of docs/performance.md and docs/operators.md from benchmarks/results/*.csv.

    python scripts/performance_page.py

The text between `<!-- table: NAME -->` and `<!-- end -->` is generated from NAME.csv, or from
ops.csv for names that begin with op_; the text around it is written by hand.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs" / "performance.md", ROOT / "docs" / "operators.md")
RESULTS = ROOT / "benchmarks" / "results"
TARGETS = ROOT / "benchmarks" / "op_targets.csv"
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
CONTEXT = ("device", "torch", "triton", "liger", "megatron_core", "commit")
PEER_ORDER = ("ours", "eager", "compile", "liger")
GEMMS = "GEMMs alone"
REMOVED = ("ours-tuned",)  # stacks that were tried and are not maintained

Row = dict[str, str]
Measurements = dict[tuple[str, ...], list[Row]]


def render(page: str, results: Path = RESULTS) -> str:
    """Return the page with every table generated again."""
    return TABLE.sub(lambda match: match[1] + _table(results, match[2]) + match[3], page)


def _table(results: Path, name: str) -> str:
    path = results / f"{'ops' if name.startswith('op_') else name}.csv"
    if not path.is_file():
        return f"\nNot measured yet: benchmarks/results has no {path.name}.\n\n"
    rows = _read(path)
    return "\n" + "\n".join(TABLES.get(name, plain)(rows)) + "\n\n"


def _read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def plain(rows: list[Row]) -> Iterator[str]:
    """Show the last run of any other file, column by column."""
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    columns = [column for column in rows[0] if column not in CONTEXT]
    yield from markdown(columns, [[row[column] for column in columns] for row in rows])
    yield from ["", _measured_on(rows)]


def ops(rows: list[Row]) -> Iterator[str]:
    """Show one table per operator, the last measurement of each shape and pass."""
    groups = _last_measurements(rows)
    yield _measured_on([row for group in groups.values() for row in group])
    for name in dict.fromkeys(key[0] for key in groups):
        yield from ["", f"### {name}", ""]
        yield from _operator([group for key, group in groups.items() if key[0] == name])


def _last_measurements(rows: list[Row]) -> Measurements:
    groups: Measurements = {}
    for row in rows:
        if row["device"] == "cpu":
            continue
        group = groups.setdefault((row["op"], row["shape"], row["dtype"], row["pass"]), [])
        if group and group[0]["run"] != row["run"]:  # a later run replaces an earlier one
            group.clear()
        group.append(row)
    return groups


def op_targets(rows: list[Row]) -> Iterator[str]:
    """Show the target of each operator and the worst of its shapes."""
    groups = list(_last_measurements(rows).values())
    head = ["", "operator", "pass", "held against", "target", "reached", "worst shape", ""]
    yield from markdown(head, [_target(target, groups) for target in _read(TARGETS)])


def op_choices(rows: list[Row]) -> Iterator[str]:
    """Show the largest shape of each operator: ours, the best other, and the roofline."""
    largest: dict[str, list[Row]] = {}
    for group in _last_measurements(rows).values():
        longest = largest.setdefault(group[0]["op"], group)
        if float(group[0]["floor_us"]) > float(longest[0]["floor_us"]):
            largest[group[0]["op"]] = group
    lines = []
    for group in largest.values():
        ours = next((row for row in group if row["peer"] == "ours"), None)
        others = [row for row in group if row["error"] and row["peer"] != "ours"]
        if ours is not None:
            best = min(others, key=lambda row: float(row["gpu_us"]), default=None)
            second = "-" if best is None else f"{best['peer']} {_micro(best['gpu_us'])}"
            cells = ours["op"], f"{ours['shape']}, {ours['pass']}", _micro(ours["gpu_us"]), second
            lines.append([*cells, ours["floor_over_time"]])
    yield from markdown(
        ["operator", "shape, pass", "ours, us", "best other, us", "roofline / ours"], lines
    )


def _target(target: Row, groups: list[list[Row]]) -> list[str]:
    """Compare one target with the measurements of its operator, pass and shapes (all if none)."""
    shares = []
    for group in groups:
        ours = next((row for row in group if row["peer"] == "ours"), group[0])
        named = target["shape"].split("|") if target["shape"] else [ours["shape"]]
        if (ours["op"], ours["pass"]) == (target["op"], target["pass"]) and ours["shape"] in named:
            share = _share(target["against"], ours, group)
            if ours["peer"] == "ours" and share is not None:
                shares.append((share, ours["shape"]))
    cells = [target[column] for column in ("row", "op", "pass", "against", "at_least")]
    if not shares:
        return [*cells, "-", "", "not measured yet"]
    share, shape = min(shares)
    is_met = share >= float(target["at_least"])
    return [*cells, f"{share:.3f}", shape, "reached" if is_met else f"missed: {target['why']}"]


def _share(against: str, ours: Row, group: list[Row]) -> float | None:
    """Return the ratio of a target (a time, a memory size, a peer) to ours."""
    if against.endswith(" us"):
        return float(against.removesuffix(" us")) / float(ours["gpu_us"])
    if against.endswith(" MiB"):
        return float(against.removesuffix(" MiB")) / float(ours["peak_mib"])
    if against in ("roofline", "best other"):
        text = ours["floor_over_time" if against == "roofline" else "best_other_over_time"]
        return float(text) if text else None
    others = [row for row in group if row["peer"] == against]
    return float(others[0]["gpu_us"]) / float(ours["gpu_us"]) if others else None


def _operator(groups: list[list[Row]]) -> Iterator[str]:
    peers = dict.fromkeys(row["peer"] for group in groups for row in group)
    ordered = sorted(peers, key=lambda peer: (PEER_ORDER + tuple(peers)).index(peer))
    head = ["shape", "pass", *ordered, "roofline", "roofline / ours", "best other / ours"]
    has_gemms = GEMMS in peers
    head += [f"{GEMMS} / ours"] if has_gemms else []
    lines = []
    for group in groups:
        by_peer = {row["peer"]: row for row in group}
        ours, first = by_peer.get("ours"), group[0]
        cells = [_time(by_peer.get(peer)) for peer in ordered]
        shares = [ours["floor_over_time"], ours["best_other_over_time"]] if ours else ["", ""]
        if has_gemms:
            share = _share(GEMMS, ours, group) if ours else None
            shares.append("" if share is None else f"{share:.3f}")
        lines.append([first["shape"], first["pass"], *cells, _micro(first["floor_us"]), *shares])
    yield from markdown(head, lines)
    memory = _memory(groups)
    if memory:
        yield from ["", memory]


def _time(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{_micro(row['gpu_us'])} ({row['launches']})"


def _memory(groups: list[list[Row]]) -> str:
    """Return the peak memory of the largest shape."""
    whole = [group for group in groups if group[0]["pass"] == "full"] or groups
    group = max(whole, key=lambda group: float(group[0]["floor_us"]))
    peaks = ", ".join(f"{row['peer']} {row['peak_mib']}" for row in group if row["peak_mib"])
    return f"Peak MiB at {group[0]['shape']}, {group[0]['pass']}: {peaks}." if peaks else ""


def train_step(rows: list[Row]) -> Iterator[str]:
    """Show the last row of each stack, the fastest first."""
    rows = [
        row for row in _last(rows, "shape", "peer", "micro_batch") if row["peer"] not in REMOVED
    ]
    head = ["stack", "micro-batch", "tokens/s", "slowest - fastest", "model TFLOP/s", "peak GiB"]
    head += ["least time / time", "in a long row", "loss", "commit"]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        group = [row for row in rows if row["shape"] == shape]
        group.sort(key=lambda row: (row["micro_batch"], -float(row["tokens_per_s"])))
        yield from [f"### {shape}", ""]
        lines = [
            [
                row["peer"],
                row["micro_batch"],
                f"{int(row['tokens_per_s']):,}",
                f"{int(row['slowest']):,} - {int(row['fastest']):,}",
                row["model_tflops"],
                row["peak_gib"],
                row["roofline_ratio"],
                row.get("sustained_ratio") or "-",
                row["loss"],
                row["commit"],
            ]
            for row in group
        ]
        yield from markdown(head, lines)
        yield from ["", _measured_on(group), ""]


def last_of(*keys: str) -> Callable[[list[Row]], Iterator[str]]:
    """Show the last of the rows that have the same in some columns, each with its commit."""
    return lambda rows: _with_commits(_last(rows, *keys))


def _with_commits(rows: list[Row]) -> Iterator[str]:
    columns = [column for column in rows[0] if column not in CONTEXT or column == "commit"]
    yield from markdown(columns, [[row[column] for column in columns] for row in rows])
    yield from ["", _measured_on(rows)]


def _last(rows: list[Row], *columns: str) -> list[Row]:
    """Return the last of the rows that have the same in these columns."""
    return list({tuple(row[column] for column in columns): row for row in rows}.values())


def markdown(head: list[str], lines: Iterable[list[str]]) -> Iterator[str]:
    """Write a table."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for line in lines:
        yield "| " + " | ".join(line) + " |"


def _measured_on(rows: list[Row]) -> str:
    found = {
        column: ", ".join(dict.fromkeys(row[column] for row in rows if row.get(column)))
        for column in CONTEXT
    }
    words = [f"{column.replace('_', '-')} {value}" for column, value in found.items() if value]
    return f"Measured on: {'; '.join(words).removeprefix('device ')}."


def _micro(text: str) -> str:
    """Round microseconds to three significant digits."""
    value = float(text)
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


TABLES: dict[str, Callable[[list[Row]], Iterator[str]]] = {
    "ops": ops,
    "op_targets": op_targets,
    "op_choices": op_choices,
    "train_step": train_step,
    "mm_step": last_of("peer", "against"),
    "moe_layer": last_of("shape", "peer"),
}

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(render(page.read_text()))
