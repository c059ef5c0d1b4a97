"""`mindspeed-llm chat`: chat with a model; one process is one rank."""

import argparse
import io
import signal
import sys
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from mindspeed.config import ConfigError, read_options
from mindspeed_llm.cli.generate import declare, run_tasks
from mindspeed_llm.generation.options import GenerateOptions

if TYPE_CHECKING:
    from mindspeed_llm.generation.session import Conversation, Session

QUIT, CLEAR = ("q", "quit", "exit"), ("clear", "new")
USER_PROMPT, MODEL_PROMPT = "You >> ", "Model >> "


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    return declare(subparsers, "chat", "chat with a model (generate --task chat)")


def run(args: argparse.Namespace) -> int:
    """Chat, as one of the ranks."""
    options = read_options(args, GenerateOptions)
    return run_tasks(options.model_copy(update={"task": ("chat",)}))


class InterruptFlag:
    """A context in which Ctrl-C sets a flag instead of raising."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> "InterruptFlag":
        self._before = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True


def talk(session: "Session") -> None:
    """Read prompts and answer them until the user quits."""
    from mindspeed_llm.generation.session import Conversation

    if isinstance(sys.stdin, io.TextIOWrapper):  # terminals leave half of a character behind
        sys.stdin.reconfigure(errors="replace")
    conversation = Conversation(session)
    print("q quits, clear forgets what was said, Ctrl-C stops an answer.")
    while (question := _ask()) is not None and question.strip() not in QUIT:
        if question.strip() in CLEAR:
            conversation.clear()
            print("(forgotten)")
        elif question.strip():
            _answer(conversation, question)


def _ask() -> str | None:
    """Return the next prompt, None at the end of the input."""
    try:
        if sys.stdin.isatty():
            return input(USER_PROMPT)
        line = sys.stdin.readline()
        question = line.rstrip("\r\n")
        print(f"{USER_PROMPT}{question}", flush=True)  # not typed on a terminal
        return question if line else None
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print("\n(q quits)")
        return ""


def _answer(conversation: "Conversation", question: str) -> None:
    with InterruptFlag() as interrupt:
        try:
            pieces = conversation.ask(question, lambda: interrupt.received)
        except ConfigError as error:  # a question that is too long; the next one may not be
            print(f"({error})")
            return
        if conversation.dropped:
            print(f"(too long: the {conversation.dropped} oldest turn(s) were dropped)")
        print(MODEL_PROMPT, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print(" (stopped)" if interrupt.received else "", flush=True)
