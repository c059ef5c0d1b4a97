"""The page on preprocessing says about every flag what `--help` says."""

import argparse
from pathlib import Path

from mindspeed.config import add_flags
from mindspeed_llm.data.handlers import HANDLERS, PRETRAIN
from mindspeed_llm.data.options import PreprocessOptions

PAGE = (Path(__file__).parents[4] / "docs/llm/preprocess.md").read_text()


def test_every_flag_is_explained_as_in_the_help():
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, PreprocessOptions)
    for action in parser._actions:
        help_text = action.help.replace("%%", "%")
        assert f"| `{action.option_strings[0]}` | {help_text} |\n" in PAGE


def test_every_handler_is_in_the_table():
    assert all(f"| `{name}` |" in PAGE for name in (PRETRAIN, *HANDLERS))
