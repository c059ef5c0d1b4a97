"""`mindspeed-llm plot`: draw the curve of a run's log on the terminal and into a PNG file."""

import argparse
import math
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError, did_you_mean, parse_json

HEIGHT, WIDTH = 12, 72
LEVELS = " ▁▂▃▄▅▆▇█"
BEFORE_METRICS = "global batch size"
"""The last of the fields before the metrics of a line."""
Points = list[tuple[int, float]]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plot", help="draw the loss curve of a run", allow_abbrev=False
    )
    parser.add_argument("log", type=Path, help="the log.jsonl of a run, or the folder it is in")
    parser.add_argument("--key", help="metric to draw (default: the first, such as lm loss)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the curve as a picture too")
    return parser


def run(args: argparse.Namespace) -> int:
    """Draw the curve."""
    key, points = read(args.log, args.key)
    print("\n".join(draw(points, key)))
    if args.png is not None:
        picture(points, key, args.png)
        print(args.png)
    return 0


def read(log: Path, key: str | None = None) -> tuple[str, Points]:
    """Read a metric of every line that has it, by iteration; return its name too."""
    path = log / "log.jsonl" if log.is_dir() else log
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    records = [_record(path, number, line) for number, line in enumerate(lines, 1)]
    names = {name for record in records for name in record} - {"iteration"}
    key = key or _first_metric(records, path)
    if key not in names:
        raise ConfigError(f"{path} has no number {key!r}: {did_you_mean(key, names)}")
    points = [(record["iteration"], record[key]) for record in records if key in record]
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        raise ConfigError(f"{path}: no {key!r} in it is finite, so there is nothing to draw")
    return key, finite


def _first_metric(records: list[dict[str, Any]], path: Path) -> str:
    """Return the first metric of a training log: it follows what every run logs."""
    names = [name for record in records[:1] for name in record if name != "iteration"]
    if BEFORE_METRICS in names:
        names = names[names.index(BEFORE_METRICS) + 1 :]
    if not names:
        raise ConfigError(f"{path}: holds no metric, so there is nothing to draw")
    return names[0]


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
        int(record["iteration"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}, line {number}: is not a line of a training log") from None
    return {name: value for name, value in record.items() if isinstance(value, int | float)}


def draw(points: Points, key: str) -> list[str]:
    """Return the lines of a curve in block characters, the highest value on top."""
    columns = _columns([value for _, value in points])
    low, high = min(columns), max(columns)
    heights = [(value - low) / ((high - low) or 1) * HEIGHT for value in columns]
    lines = [f"{key}: {points[0][1]:.4g} at {points[0][0]}, {points[-1][1]:.4g} at {points[-1][0]}"]
    for row in range(HEIGHT - 1, -1, -1):
        label = {HEIGHT - 1: high, 0: low}.get(row)
        cells = [LEVELS[round(8 * min(1.0, max(0.0, height - row)))] for height in heights]
        # The lowest value is drawn too: a curve that ends there has not ended before.
        if row == 0:
            cells = [LEVELS[1] if cell == " " else cell for cell in cells]
        lines.append(f"{'' if label is None else f'{label:.4g}':>9} |{''.join(cells).rstrip()}")
    return lines


def _columns(values: list[float]) -> list[float]:
    """Average the values into as many columns as fit, or widen them."""
    count = min(WIDTH, len(values))
    bounds = [len(values) * column // count for column in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(bounds, bounds[1:])]
    return [mean for mean in means for _ in range(WIDTH // count)]


def picture(points: Points, key: str, path: Path) -> None:
    """Write the curve as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(*zip(*points), marker="." if len(points) < 100 else "")
    axes.set(xlabel="iteration", ylabel=key)
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
