"""What is kept and shown of the ranks' output."""

import io
import os

from mindspeed.launch.output import Relay, Tail, error_tail, stacks


def _relay(pieces: list[bytes], prefix: str = "") -> tuple[bytes, str]:
    reader, writer = os.pipe()
    tail, sink = Tail(), io.BytesIO()
    with Relay() as relay:
        relay.add(os.fdopen(reader, "rb"), tail, sink, prefix)
        for piece in pieces:
            os.write(writer, piece)
            relay.pump(1.0)
        os.close(writer)
        relay.pump(1.0)
    return sink.getvalue(), tail.text()


def test_rank_0_is_passed_on_byte_for_byte() -> None:
    pieces = [b"10%\r20", b"%\r\xff", b"end"]
    assert _relay(pieces)[0] == b"".join(pieces)


def test_prefixed_lines_are_whole_and_none_is_lost() -> None:
    shown, kept = _relay([b"one\ntw", b"o\nthree"], prefix="[rank 1] ")
    assert shown == b"[rank 1] one\n[rank 1] two\n[rank 1] three\n"
    assert kept == "one\ntwo\nthree"


def test_a_tail_forgets_the_oldest() -> None:
    tail = Tail()
    for number in range(20_000):
        tail.add(b"%d\n" % number)
    assert tail.text().endswith("19998\n19999\n")
    assert len(tail.text()) <= 65536


def test_last_words_are_the_last_chain_of_tracebacks() -> None:
    text = (
        "Traceback (most recent call last):\nOSError: caught and logged\nstep 1\n"
        "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: a\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\nKeyError: b\n"
    )
    lines = error_tail(text).splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", "ValueError: a"]
    assert lines[-1] == "KeyError: b"


def test_last_words_without_a_traceback_are_the_last_lines() -> None:
    text = "\n".join(str(number) for number in range(100))
    assert error_tail(text).splitlines() == [str(number) for number in range(60, 100)]


def test_stacks_drop_what_surrounds_them() -> None:
    dump = (
        "Fatal Python error: Aborted\n\nThread 0x1:\n  File a\n\nExtension modules: x (total: 1)\n"
    )
    assert stacks("earlier\n" + dump) == "Thread 0x1:\n  File a"
    assert stacks("not a Python process") == "no Python stack was written"
