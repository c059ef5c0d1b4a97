"""`mindspeed-llm export-lora`: adapters of a training checkpoint for peft, or merged weights."""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "export-lora",
        help="write trained adapters in peft's format, or an HF model with them merged",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="--save of a training with --lora-r")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--merge", action="store_true", help="write a whole HF model instead")
    parser.add_argument("--hf-cfg-dir", help="folder with the config.json of the model")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare what is read with its digests"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Export, and print what was written."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    from mindspeed.checkpoint.detection import detect
    from mindspeed_llm.checkpoint import adapters
    from mindspeed_llm.checkpoint.loading import config_folder
    from mindspeed_llm.models.registry import read_model_config

    found = detect(args.checkpoint)
    shape = read_model_config(config_folder(found, args.hf_cfg_dir))
    if not args.merge:
        count = adapters.export(
            found, shape, Path(args.out), verify=not args.no_verify, overwrite=args.overwrite
        )
        print(f"{count} adapters\n{args.out}")
        return 0
    adapters.check_present(found)
    return _merge(args)


def _merge(args: argparse.Namespace) -> int:
    from mindspeed.checkpoint.progress import ByteProgress
    from mindspeed_llm.checkpoint import ConvertOptions
    from mindspeed_llm.checkpoint.conversion import convert

    options = ConvertOptions(
        load_model_type="mg",
        save_model_type="hf",
        load_dir=args.checkpoint,
        save_dir=args.out,
        hf_cfg_dir=args.hf_cfg_dir,
        no_verify=args.no_verify,
        overwrite=args.overwrite,
    )
    with ByteProgress("merging") as progress:
        done = convert(options, progress.advance)
    print(f"{done.family}: {done.nbytes / 1e9:.2f} GB, {done.dtype}\n{done.folder}")
    return 0
