"""Data files to the token files that training reads; the same as `mindspeed-llm preprocess`."""

from mindspeed.cli.main import run_script

if __name__ == "__main__":
    run_script("mindspeed_llm", "preprocess")
