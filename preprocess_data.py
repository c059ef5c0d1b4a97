"""Data files to the token files that training reads; the same as `mindspeed-llm preprocess`."""

import sys

from mindspeed.cli.main import exit_process
from mindspeed_llm.cli.main import main

if __name__ == "__main__":
    exit_process(main(["preprocess", *sys.argv[1:]]))
