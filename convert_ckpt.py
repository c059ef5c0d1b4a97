"""Convert weights between HF and Megatron: `mindspeed-llm convert` under its old name."""

import sys

from mindspeed_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
