"""`python -m mindspeed` is the `mindspeed` command."""

import sys

from mindspeed.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
