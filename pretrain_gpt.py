"""Train a model on documents: `mindspeed-llm pretrain` under its old name."""

import sys

from mindspeed_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["pretrain", *sys.argv[1:]]))
