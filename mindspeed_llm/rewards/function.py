"""A reward function that the user names: `--reward-fn path.py:function`.

The file is code, and running it is what the flag asks for; beside it only --rollout-engine runs
one.
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError
from mindspeed.launch.process import die_with_parent
from mindspeed_llm.rewards import worker

LONGEST_TEXT = 60


def split_spec(
    spec: str, flag: str = "--reward-fn", example: str = "rewards.py:score"
) -> tuple[Path, str]:
    """Parse `path.py:function`, and check that the file exists."""
    path, _, name = spec.rpartition(":")
    if not path or not name.isidentifier():
        raise ConfigError(f"{flag} {spec}: give a file and a function, as in {example}")
    if not Path(path).is_file():
        raise ConfigError(f"{flag} {spec}: there is no file {path}")
    return Path(path), name


class RewardFunction:
    """Calls the function in a process of its own, which is ended if it does not answer in time."""

    def __init__(self, spec: str, timeout: float) -> None:
        self._spec, self._timeout = spec, timeout
        path, name = split_spec(spec)
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(timeout)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, worker.__file__, str(theirs.fileno()), str(path), name],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent(os.getpid()),
                start_new_session=True,  # what the function starts is ended with it
            )
        self._receive("was not loaded")

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], fields: Mapping[str, list[Any]]
    ) -> dict[str, list[float]]:
        """Return the rewards of all completions by the names of their parts, whose sum counts.

        A function that returns one list has one part, named "". `fields` are those of the records.
        """
        arguments = {**fields, "prompts": list(prompts), "completions": list(completions)}
        try:
            worker.send(self._channel, arguments)
        except TimeoutError:
            raise self._timed_out("did not answer") from None
        except OSError:
            raise self._ended() from None
        parts: dict[str, list[float]] = self._receive("did not answer")["rewards"]
        for name, rewards in parts.items():
            self._check(name, rewards, completions)
        return parts

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _check(self, name: str, rewards: Sequence[float], completions: Sequence[str]) -> None:
        of = f" of {name!r}" if name else ""
        if len(rewards) != len(completions):
            raise ConfigError(
                f"--reward-fn {self._spec}: returned {len(rewards)} rewards{of} for "
                f"{len(completions)} completions: return one for each"
            )
        for text, reward in zip(completions, rewards):
            if not math.isfinite(reward):
                shown = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."
                raise ConfigError(
                    f"--reward-fn {self._spec}: the reward{of} of {shown!r} is {reward}: rewards "
                    "must be finite numbers"
                )

    def _receive(self, what: str) -> Any:
        try:
            message = worker.receive(self._channel)
        except TimeoutError:
            raise self._timed_out(what) from None
        except (EOFError, OSError):
            raise self._ended() from None
        if "error" in message:
            self.close()
            raise ConfigError(f"--reward-fn {self._spec}: {message['error']}")
        return message

    def _timed_out(self, what: str) -> ConfigError:
        self.close()
        return ConfigError(
            f"--reward-fn {self._spec}: {what} within {self._timeout:g} s and was ended: make it "
            "faster, or raise --reward-timeout"
        )

    def _ended(self) -> ConfigError:
        code = self._process.wait()
        self._channel.close()
        return ConfigError(f"--reward-fn {self._spec}: its process ended with exit code {code}")
