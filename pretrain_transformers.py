"""Train a model with FSDP2 from a YAML file or flags: `mindspeed-mm train` under its old name."""

from mindspeed.cli.main import run_script

if __name__ == "__main__":
    run_script("mindspeed_mm", "train")
