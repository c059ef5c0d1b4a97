"""What all rows of bench_commands.py share, and what a row is: a command with a parsable log."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from train_step.shapes import Shape

ROOT = Path(__file__).resolve().parents[2]
GLOBAL_BATCH = 16
PROMPT_SHARE = 0.25


@dataclass(frozen=True)
class Job:
    """A benchmark run: the model, the number of steps, and the folder of its inputs."""

    shape: Shape
    shape_name: str
    steps: int
    folder: Path
    """Generated models, tokenizers and data."""
    sites: dict[str, str] = field(default_factory=dict)
    """Paths to put in front of PYTHONPATH, by the name of a peer."""
    attention: str = "auto"
    """The attention of transformers' models."""
    global_batch: int = GLOBAL_BATCH
    prompt_share: float = PROMPT_SHARE
    """Of the tokens of each sequence of a pair."""

    @property
    def tokens_per_step(self):
        """Return the tokens of a step of full rows."""
        return self.global_batch * self.shape.sequence

    @property
    def samples_per_step(self):
        """Return the conversations with about as many tokens as a step of full rows."""
        return 2 * self.global_batch if self.shape_name == "tiny" else 88

    @property
    def is_fp32(self):
        """Return whether a shape is trained in float32: the one for cpus."""
        return self.shape_name == "smollm2"

    def site(self, name):
        """Return the folder given by --site for a peer that is a checkout."""
        if name not in self.sites:
            sys.exit(f"--site {name}=FOLDER is missing: the checkout that this row runs")
        return Path(self.sites[name])


@dataclass(frozen=True)
class Command:
    """How to start one training run and how to parse its log."""

    argv: list[str]
    log: str
    """The format of its lines, one of logs.FORMATS."""
    env: dict[str, str] = field(default_factory=dict)
    tokens_per_step: int | None = None
    """For logs that do not count tokens."""
    stop_after: tuple[str, int] | None = None
    """A regex and how many matching lines end the run: for commands that save at their end."""
    global_batch: int | None = None
    """Where it is not the job's."""
    site: str = ""
    """The name under which --site gives its packages."""
    packages: tuple[str, ...] = ()
    """Whose versions are recorded."""


@dataclass(frozen=True)
class Case:
    """A row, for some sizes of the micro-batch."""

    build: Callable[[Job, int], Command]
    about: str
    micro_batches: tuple[int, ...] = (2,)
    shapes: tuple[str, ...] = ("1.5B", "tiny")
    has_conversations: bool = False
    """It trains on conversations, not on documents."""
