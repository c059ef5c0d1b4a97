"""Data files to the token files that training reads; the same as `mindspeed-llm preprocess`."""

import sys

from mindspeed_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
