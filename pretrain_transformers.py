"""Train a model with FSDP2 from a YAML file or flags: `mindspeed-mm train` under its old name."""

import sys

from mindspeed.cli.main import exit_process
from mindspeed_mm.cli.main import main

if __name__ == "__main__":
    exit_process(main(["train", *sys.argv[1:]]))
