"""`python -m mindspeed_mm` is the `mindspeed-mm` command."""

from mindspeed_mm.cli.main import script

if __name__ == "__main__":
    script()
