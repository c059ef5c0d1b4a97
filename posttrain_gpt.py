"""Fine-tune a model: `mindspeed-llm posttrain` under its old name."""

import sys

from mindspeed_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["posttrain", *sys.argv[1:]]))
