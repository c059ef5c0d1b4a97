"""Profile of a step: the kernels of the device, and its idle time."""

from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

WARM_UP, STEPS = 8, 3
LONG_GAP = 5  # microseconds; the next of two queued kernels starts sooner


def write_profile(path, step):
    """Write the kernels of some consecutive steps, sorted by total time."""
    for _ in range(WARM_UP):  # clocks drop while the device warms up
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in run.events()
        if event.device_type == DeviceType.CUDA
    )
    lines = [*_summary(spans), "", "ms a step, calls a step, us a call", *_kernels(spans)]
    Path(path).write_text("\n".join(lines) + "\n")


def _summary(spans):
    """Yield the busy and idle time."""
    busy, gaps, end = 0.0, [], spans[0][0]
    for start, stop, name in spans:
        if start > end:
            gaps.append((start - end, name))
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    total = end - spans[0][0]
    long = [gap / STEPS for gap, _ in gaps if gap > LONG_GAP]
    yield f"{STEPS} steps, {total / STEPS / 1e3:.2f} ms each, {len(spans) / STEPS:.0f} kernels"
    yield f"busy {busy / STEPS / 1e3:.2f} ms, idle {(total - busy) / STEPS / 1e3:.2f} ms a step"
    yield f"{len(long)} gaps of more than {LONG_GAP} us: {sum(long) / 1e3:.2f} ms a step"
    for gap, name in sorted(gaps, reverse=True)[:10]:
        yield f"  {gap:.0f} us before {name[:90]}"


def _kernels(spans):
    """Add up by name."""
    times = {}
    for start, stop, name in spans:
        times.setdefault(name, []).append(stop - start)
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1])):
        count, total = len(each), sum(each)
        yield f"{total / STEPS / 1e3:9.3f} {count / STEPS:7.1f} {total / count:9.1f}  {name[:120]}"
