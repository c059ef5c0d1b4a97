"""`python -m mindspeed_mm` is the `mindspeed-mm` command."""

import sys

from mindspeed_mm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
