"""Independent work beside what is queued, on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mindspeed.device.choice import current


def begin_beside(work: Callable[[], None]) -> Callable[[], None]:
    """Queue work behind what is queued now, beside what will be; return how to wait for it.

    What is queued behind a call of the result waits for the work, which allocates nothing.
    """
    device = current()
    stream = device.stream()
    stream.wait_event(device.current_stream().record_event())
    with device.use_stream(stream):
        work()
    done = stream.record_event()
    return lambda: device.current_stream().wait_event(done)


class SideStream:
    """Runs work that waits for nothing that is queued after the stream was made.

    The last wave of a GEMM leaves processors idle; kernels of the side fill in. The work may read
    what existed when the stream was made, and what it makes itself. It must not share buffers with
    the work beside it.
    """

    def __init__(self) -> None:
        self._device = current()
        self._stream = self._device.stream()
        self._stream.wait_event(self._device.current_stream().record_event())

    def run(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Queue the work; what is queued behind this call waits for its results."""
        with self._device.use_stream(self._stream):
            results = work()
        here = self._device.current_stream()
        here.wait_event(self._stream.record_event())
        for result in results:
            result.record_stream(here)  # its memory is not free before `here` is done with it
        return results
