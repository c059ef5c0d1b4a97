"""Train a model on documents: `mindspeed-llm pretrain` under its old name."""

from mindspeed.cli.main import run_script

if __name__ == "__main__":
    run_script("mindspeed_llm", "pretrain")
