"""`mindspeed-llm import-gguf`: make an HF directory out of a GGUF file."""

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "import-gguf", help="make a trainable HF directory out of a GGUF file", allow_abbrev=False
    )
    parser.add_argument("file", type=Path, help="the GGUF file, quantised or not")
    parser.add_argument("folder", type=Path, help="the HF directory to write")
    parser.add_argument(
        "--params-dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="type of the weights that are written (default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    return parser


def run(args: argparse.Namespace) -> int:
    """Import, and print what was written."""
    from mindspeed_llm.checkpoint.gguf import import_gguf

    import_gguf(args.file, args.folder, args.params_dtype, args.overwrite)
    size = sum(path.stat().st_size for path in args.folder.iterdir())
    print(f"{args.folder}: weights, config and tokenizer, {size / 1e9:.2f} GB")
    return 0
