"""The `mindspeed-llm` command: every other file of this folder is a sub-command."""

from collections.abc import Sequence
from typing import NoReturn

import mindspeed.cli.main
import mindspeed_llm.cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code."""
    description = "From raw text and HF weights to a fine-tuned model that talks."
    return mindspeed.cli.main.main(argv, mindspeed_llm.cli, description)


def script() -> NoReturn:
    """Be the process of the `mindspeed-llm` command."""
    mindspeed.cli.main.exit_process(main())
