"""The `mindspeed-mm` command: every other file of this folder is a sub-command."""

from collections.abc import Sequence

import mindspeed.cli.main
import mindspeed_mm.cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code."""
    description = "Bring a multimodal or Hugging Face model and shard it with FSDP2."
    return mindspeed.cli.main.main(argv, mindspeed_mm.cli, description)
