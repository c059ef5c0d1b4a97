"""`python -m mindspeed_llm` is the `mindspeed-llm` command."""

import sys

from mindspeed_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
