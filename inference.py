"""Answer prompts or talk: `mindspeed-llm generate` under its old name."""

import sys

from mindspeed_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
