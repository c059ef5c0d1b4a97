"""Print the answers of two models to the same questions side by side."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table


def answers(file: str) -> dict[str, str]:
    """Read what inference.py wrote: each question and its answer."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return {record["prompt"]: record["text"].strip() for record in map(json.loads, lines)}


def main() -> None:
    """Print a table of questions, answers before and answers after."""
    before, after = map(answers, sys.argv[1:3])
    table = Table("question", "before", "after", show_lines=True)
    for question, answer in before.items():
        table.add_row(question, answer, after[question])
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
