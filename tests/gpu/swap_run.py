"""Fifty steps with tensors on the host: plain, swapped, and with copies that are late.

A rank prints one JSON line: losses, a digest of the gradients of the last step, copies of a run.
Several ranks share one card, which NCCL refuses: gloo sends and sums what is copied to the host.
"""

import hashlib
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import torch

import mindspeed
import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed import device
from mindspeed.device.copies import CopyStream
from mindspeed.memory.swap import Swapper
from mindspeed.memory.swap_attention import swap_block
from mindspeed.memory.swap_layer_input import SwappedInputs
from tests.gpt.layout import Layout
from tests.gpt.training import Training, destroy_groups

STEPS = 50
CYCLES = 1_000_000
"""By which each copy is late: about half a millisecond."""
LLAMA = Layout("llama", spec="te", bf16=True)
RUNS = {
    "plain": (LLAMA, None),
    "swapped": (LLAMA, False),
    "late": (LLAMA, True),
    "recomputed": (replace(LLAMA, recompute=("full", "uniform", 1)), None),
    "inputs late": (replace(LLAMA, recompute=("full", "uniform", 1)), True),
}


class CountedCopies(CopyStream):
    """Copies that are counted, and wait on their stream before they begin."""

    def __init__(self, is_late):
        super().__init__()
        self.is_late, self.count = is_late, 0

    def start(self, target, source, *after):
        """Queue a copy behind a pause."""
        self.count += 1
        if self.is_late and device.current().name == "cuda":
            with self._device.use_stream(self._stream):
                torch.cuda._sleep(CYCLES)
        return super().start(target, source, *after)


def train(layout, is_late):
    """Train; return losses, the digest of the last gradients, and the copies."""
    training = Training(layout)
    copies = []
    for chunk in training.chunks if is_late is not None else ():
        streams = [CountedCopies(is_late), CountedCopies(is_late)]
        copies += streams
        swapper = Swapper(0, *streams)
        if layout.recompute:
            chunk.decoder.swapped_inputs = SwappedInputs(swapper)
        else:
            swap_block(chunk.decoder, ("self_attention",), swapper)
    losses = []
    for step in range(STEPS):
        losses.append(training.forward_backward())
        if step + 1 < STEPS:
            training.update()
    digest = hashlib.sha256()
    for gradient in training.gradients().values():
        digest.update(gradient.cpu().numpy().tobytes())
    destroy_groups()
    return losses, digest.hexdigest(), [stream.count for stream in copies]


class _Received:
    """A message that is copied to its tensor when it has arrived."""

    def __init__(self, work, buffer, target):
        self._work, self._buffer, self._target = work, buffer, target

    def wait(self):
        """Wait, and copy."""
        self._work.wait()
        self._target.data.copy_(self._buffer)


class _Sent:
    """A message, with the buffer that it is sent from."""

    def __init__(self, work, buffer):
        self._work, self._buffer = work, buffer

    def wait(self):
        """Wait until the buffer is free."""
        self._work.wait()


def through_host(*, group, prev_pipeline_rank, next_pipeline_rank, **tensors):
    """Send and receive by buffers on the host; Megatron's functions for messages have this form."""
    handles = []
    ranks = {"prev": prev_pipeline_rank, "next": next_pipeline_rank}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        _, kind, side = name.split("_")
        if kind == "send":
            buffer = tensor.detach().cpu().contiguous()
            work = torch.distributed.isend(buffer, ranks[side], group)
            handles.append(_Sent(work, buffer))
        else:
            buffer = torch.empty_like(tensor, device="cpu")
            work = torch.distributed.irecv(buffer, ranks[side], group)
            handles.append(_Received(work, buffer, tensor))
    return handles


def summed_on_host(name):
    """Return a collective of a process group that sums on the host."""
    original = getattr(torch.distributed.ProcessGroup, name)

    def collective(group, tensors, *options):
        buffers = [tensor.cpu() for tensor in tensors]
        work = original(group, buffers, *options)
        work.wait()
        for tensor, buffer in zip(tensors, buffers, strict=True):
            tensor.copy_(buffer)
        return work

    return mock.patch.object(torch.distributed.ProcessGroup, name, collective)


def main():
    """Run what was asked for."""
    from megatron.core.pipeline_parallel import p2p_communication

    folder, stages, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    store = torch.distributed.FileStore(f"{folder}/store", stages)
    rank = int(os.environ["RANK"])
    backend = device.current().backend if stages == 1 else "gloo"
    torch.distributed.init_process_group(backend, rank=rank, world_size=stages, store=store)
    mindspeed.enable(npu_deterministic=True, swap_attention=True, swap_layer_input=True)
    with ExitStack() as patches:
        if stages > 1:
            for name in ("_batched_p2p_ops", "_p2p_ops"):
                patches.enter_context(mock.patch.object(p2p_communication, name, through_host))
            for name in ("allreduce", "allreduce_coalesced"):
                patches.enter_context(summed_on_host(name))
        found = {}
        for name in names:
            layout, is_late = RUNS[name]
            found[name] = train(replace(layout, pp=stages), is_late)
    print(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
