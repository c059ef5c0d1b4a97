"""`mindspeed-llm plot`: draw the curve of a run's log, or a heat map of its experts' load."""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError, did_you_mean, parse_json
from mindspeed.moe.load_table import LoadTable

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
    parser.add_argument(
        "--experts",
        action="store_true",
        help="draw the load of every expert (layers x experts) as last reported",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the curve as a picture too")
    return parser


def run(args: argparse.Namespace) -> int:
    """Draw the curve, or the heat map."""
    if args.experts:
        return _run_experts(args)
    key, points = read(args.log, args.key)
    print("\n".join(draw(points, key)))
    if args.png is not None:
        picture(points, key, args.png)
        print(args.png)
    return 0


def _run_experts(args: argparse.Namespace) -> int:
    if args.key is not None:
        raise ConfigError("--experts draws no curve: drop --key")
    load = read_load(args.log)
    print("\n".join(draw_load(load)))
    if args.png is not None:
        picture_load(load, args.png)
        print(args.png)
    return 0


def read_load(log: Path) -> LoadTable:
    """Read the last report of the experts' load."""
    path, lines = _lines(log)
    for number, line in reversed(list(enumerate(lines, 1))):
        try:
            table = LoadTable.read(_json(path, number, line))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if table is not None:
            return table
    raise ConfigError(
        f"{path} has no load of experts: the model has none, or --moe-load-interval is 0"
    )


def draw_load(load: LoadTable) -> list[str]:
    """Return a line for each layer, an expert a character: full at twice an even share."""
    lines = [f"load of {len(load.shares[0])} experts at {load.iteration}, █ is twice an even share"]
    for layer, shares in zip(load.layers, load.shares, strict=True):
        cells = [LEVELS[round(min(1.0, max(0.0, share / 2)) * 8)] for share in shares]
        label = f"layer {layer}"
        lines.append(f"{label:>9} |{''.join(cells)}| {min(shares):.2f} to {max(shares):.2f}")
    return lines


def picture_load(load: LoadTable, path: Path) -> None:
    """Write the heat map as a PNG file."""
    with _figure(path) as axes:
        image = axes.imshow(load.shares, aspect="auto", vmin=0, vmax=2, cmap="viridis")
        axes.set(xlabel="expert", ylabel="layer", title=f"iteration {load.iteration}")
        axes.set_yticks(range(len(load.layers)), load.layers)
        axes.figure.colorbar(image, label="load (1 is an even share)")


def read(log: Path, key: str | None = None) -> tuple[str, Points]:
    """Read a metric of every line that has it, by iteration; return its name too."""
    path, lines = _lines(log)
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


def _lines(log: Path) -> tuple[Path, list[str]]:
    path = log / "log.jsonl" if log.is_dir() else log
    try:
        return path, path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{path}: cannot be read ({reason})") from None


def _first_metric(records: list[dict[str, Any]], path: Path) -> str:
    """Return the first metric of a training log: it follows what every run logs."""
    names = [name for record in records[:1] for name in record if name != "iteration"]
    if BEFORE_METRICS in names:
        names = names[names.index(BEFORE_METRICS) + 1 :]
    if not names:
        raise ConfigError(f"{path}: holds no metric, so there is nothing to draw")
    return names[0]


def _json(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = parse_json(line)
        int(record["iteration"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}, line {number}: is not a line of a training log") from None
    return record


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    record = _json(path, number, line)
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
    with _figure(path) as axes:
        axes.plot(*zip(*points), marker="." if len(points) < 100 else "")
        axes.set(xlabel="iteration", ylabel=key)
        axes.grid(alpha=0.3)


@contextmanager
def _figure(path: Path) -> Iterator[Any]:
    """Yield the axes of a picture, and write it."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ConfigError("--png needs matplotlib: pip install matplotlib") from None

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    yield axes
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", bbox_inches="tight")
    except OSError as error:
        raise ConfigError(f"--png {path}: cannot be written ({error.strerror})") from None
    pyplot.close(figure)
