"""The process in which a reward function runs, so that it can be ended when it hangs.

It is started with a socket, a file and the name of a function in it, and imports nothing of this
package. Messages are JSON, each after its length in bytes.
"""

import importlib.util
import json
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct("<Q")
TEXT = (str, bytes, bytearray)
NO_LIST = (*TEXT, dict, set, frozenset)
"""What can be looped over, but does not hold a reward for each completion in their order."""


def send(channel: socket.socket, message: Any) -> None:
    """Send a message."""
    content = json.dumps(message).encode()
    channel.sendall(LENGTH.pack(len(content)) + content)


def receive(channel: socket.socket) -> Any:
    """Return the next message; raise EOFError if the other end is closed."""
    (size,) = LENGTH.unpack(_read(channel, LENGTH.size))
    return json.loads(_read(channel, size))


def _read(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def load(path: str, name: str, module_name: str = "reward_function") -> Callable[..., Any]:
    """Run the file, which may import those beside it, and return its function."""
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:  # nothing else in this process is to be found there
        sys.path.remove(folder)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise ValueError(f"{path} has no function {name}; it has {', '.join(known) or 'none'}")
    return function  # type: ignore[no-any-return]


def explain(error: BaseException, path: str) -> str:
    """Return an error in one line, with the line of the user's file where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == path]
    where = f" (line {lines[-1]})" if lines else ""
    reason = " ".join(str(error).split())[:300]
    return (
        f"{type(error).__name__}{where}: {reason}" if reason else f"{type(error).__name__}{where}"
    )


def as_parts(found: Any) -> dict[str, list[float]]:
    """Return rewards by the names of their parts: "" for those without a name."""
    try:
        if isinstance(found, dict) and found and all(_is_name(name) for name in found):
            return {name: _as_numbers(values) for name, values in found.items()}
        return {"": _as_numbers(found)}
    except (TypeError, ValueError):
        shown = repr(found)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        raise TypeError(
            f"returned {shown}: return a list with a number for each completion, or a dict of such "
            "lists by name"
        ) from None


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name)


def _as_numbers(found: Any) -> list[float]:
    """Return rewards as numbers; they may be tensors or arrays, but no text that holds numbers."""
    if isinstance(found, NO_LIST):
        raise TypeError
    return [_as_number(value) for value in found]


def _as_number(value: Any) -> float:
    if isinstance(value, TEXT):
        raise TypeError
    return float(value)


def serve(channel: socket.socket, path: str, name: str) -> None:
    """Answer calls until the other end is closed."""
    sys.path.insert(0, os.path.dirname(path))  # the function may import when it is called
    try:
        function = load(path, name)
    except BaseException as error:  # noqa: BLE001  # also SystemExit: the file is the user's
        send(channel, {"error": explain(error, path)})
        return
    send(channel, {"ready": True})
    while True:
        try:
            arguments = receive(channel)
        except EOFError:
            return
        try:
            answer = {"rewards": as_parts(function(**arguments))}
        except BaseException as error:  # noqa: BLE001
            answer = {"error": explain(error, path)}  # type: ignore[dict-item]
        send(channel, answer)


if __name__ == "__main__":
    # A job is stopped by signals to all of its processes; the step at hand still needs rewards.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # what the function prints belongs to the log, not to the output of the command
    sys.path.pop(0)  # the folder of this file
    serve(socket.socket(fileno=int(sys.argv[1])), os.path.abspath(sys.argv[2]), sys.argv[3])
