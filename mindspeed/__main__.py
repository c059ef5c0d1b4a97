"""`python -m mindspeed` is the `mindspeed` command."""

from mindspeed.cli.main import script

if __name__ == "__main__":
    script()
