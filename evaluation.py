"""Score a model on tasks: `mindspeed-llm evaluate` as a script, for launchers."""

import sys

from mindspeed.cli.main import exit_process
from mindspeed_llm.cli.main import main

if __name__ == "__main__":
    exit_process(main(["evaluate", *sys.argv[1:]]))
