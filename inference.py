"""Answer prompts or talk: `mindspeed-llm generate` under its old name."""

import sys

from mindspeed.cli.main import exit_process
from mindspeed_llm.cli.main import main

if __name__ == "__main__":
    exit_process(main(["generate", *sys.argv[1:]]))
