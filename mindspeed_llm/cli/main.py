"""The `mindspeed-llm` command: every other file of this folder is a sub-command."""

from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code."""
    description = "From raw text and HF weights to a fine-tuned model that talks."
    try:
        # Imported here, so that Ctrl-C while the command is loaded is as quiet as later.
        import mindspeed.cli.main
        import mindspeed_llm.cli

        return mindspeed.cli.main.main(argv, mindspeed_llm.cli, description)
    except KeyboardInterrupt:
        return INTERRUPTED
