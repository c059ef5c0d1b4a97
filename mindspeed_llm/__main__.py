"""`python -m mindspeed_llm` is the `mindspeed-llm` command."""

from mindspeed_llm.cli.main import script

if __name__ == "__main__":
    script()
