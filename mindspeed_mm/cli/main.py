"""The `mindspeed-mm` command: every other file of this folder is a sub-command."""

from collections.abc import Sequence
from typing import NoReturn

import mindspeed.cli.main
import mindspeed_mm.cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code."""
    description = "Bring a multimodal or Hugging Face model and shard it with FSDP2."
    return mindspeed.cli.main.main(argv, mindspeed_mm.cli, description)


def script() -> NoReturn:
    """Be the process of the `mindspeed-mm` command."""
    mindspeed.cli.main.exit_process(main())
