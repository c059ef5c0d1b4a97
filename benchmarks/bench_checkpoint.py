"""What do digests cost when a checkpoint is saved and loaded?

    python benchmarks/bench_checkpoint.py [--folder DIR] [--rounds 7] [--gigabytes 1.0]

One rank saves and loads with Megatron's writer (the LLM suite) and with torch's (the multimodal
suite), with digests and without, by turns on the same disk; saves are durable, loads read from the
page cache. Records medians and the ratio of the sums of the fastest halves.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from record import record

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed.checkpoint.dcp_metadata import read_dcp_metadata
from mindspeed.checkpoint.dcp_reader import VerifiedReader, WeightsOnlyPlanner, weights_only
from mindspeed.checkpoint.dcp_writer import DigestWriter
from mindspeed.checkpoint.digests import verify, write_digests

TENSOR = 16 << 20
"""Bytes of each tensor."""


def tensors(gigabytes):
    """Return random float32 weights."""
    count = max(2, round(gigabytes * 1e9 / TENSOR))
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(TENSOR // 4, generator=generator)
    return {f"w{number}": first.roll(number).reshape(1024, -1) for number in range(count)}


class Torch:
    """Saves and loads as the multimodal suite does."""

    def save(self, state, folder, has_digests):
        """Save durably."""
        writer = DigestWriter(folder) if has_digests else dcp.FileSystemWriter(folder)
        dcp.save(state, storage_writer=writer)
        if has_digests:
            write_digests(folder, writer.files, {})

    def load(self, state, folder, is_verified):
        """Load into tensors."""
        verify(folder, enabled=is_verified, is_shared=True)
        reader = VerifiedReader(folder, read_dcp_metadata(folder))
        dcp.load(state, storage_reader=reader, planner=WeightsOnlyPlanner(folder))


class Megatron:
    """Saves and loads as the LLM suite does."""

    def save(self, state, folder, has_digests):
        """Save durably, by two processes."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        from mindspeed_llm.training.checkpoint import _save_strategy

        folder.mkdir()
        written = {}
        plain = TorchDistSaveShardedStrategy("torch_dist", 1)
        strategy = _save_strategy(written) if has_digests else plain
        dist_checkpointing.save(self._sharded(state), str(folder), strategy)
        if has_digests:
            write_digests(folder, written, {})

    def load(self, state, folder, is_verified):
        """Load into tensors."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

        verify(folder, enabled=is_verified, is_shared=True)
        metadata = read_dcp_metadata(folder)
        strategy = TorchDistLoadShardedStrategy()
        with weights_only(folder, metadata):
            dist_checkpointing.load(
                self._sharded(state), str(folder), strategy, validate_access_integrity=False
            )

    def _sharded(self, state):
        from megatron.core.dist_checkpointing import ShardedTensor

        return {n: ShardedTensor.from_rank_offsets(n, values) for n, values in state.items()}


def timed(function, *arguments):
    """Return the seconds of a call."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def measure(root, suite, state, rounds):
    """Take turns; return a row."""
    target = {name: torch.empty_like(values) for name, values in state.items()}
    times = {"save": ([], []), "load": ([], [])}
    checks = []
    for turn in range(-1, rounds):  # the first one warms up
        for has_digests in (0, 1) if turn % 2 else (1, 0):
            folder = root / f"{turn}-{has_digests}"
            saved = timed(suite.save, state, folder, has_digests)
            if turn >= 0:
                times["save"][has_digests].append(saved)
        folder = root / f"{turn}-1"
        for is_verified in (0, 1) if turn % 2 else (1, 0):
            loaded = timed(suite.load, target, folder, is_verified)
            if turn >= 0:
                times["load"][is_verified].append(loaded)
        checks.append(timed(verify, folder))
        for name in (f"{turn}-0", f"{turn}-1"):
            shutil.rmtree(root / name)
    size = sum(values.nbytes for values in state.values())
    row = {"writer": type(suite).__name__.lower(), "gb": f"{size / 1e9:.2f}"}
    for kind, (without, with_digests) in times.items():
        row[f"{kind}_s"] = f"{statistics.median(without):.3f}"
        row[f"{kind}_digests_s"] = f"{statistics.median(with_digests):.3f}"
        row[f"{kind}_ratio"] = f"{fastest(with_digests) / fastest(without):.3f}"
    row["verify_gb_per_s"] = f"{size / 1e9 / min(checks):.1f}"
    return row


def fastest(seconds):
    """Return the mean of the faster half, which other work on the machine disturbs less."""
    return statistics.mean(sorted(seconds)[: -(-len(seconds) // 2)])


def main():
    """Measure both, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    state, rows = tensors(options.gigabytes), []
    for suite in (Megatron(), Torch()):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            rows.append(measure(Path(name), suite, state, options.rounds))
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    record("checkpoint", rows)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
