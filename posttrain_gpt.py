"""Fine-tune a model: `mindspeed-llm posttrain` under its old name."""

import sys

from mindspeed.cli.main import exit_process
from mindspeed_llm.cli.main import main

if __name__ == "__main__":
    exit_process(main(["posttrain", *sys.argv[1:]]))
