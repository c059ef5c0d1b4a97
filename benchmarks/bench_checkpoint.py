"""What do digests cost when a checkpoint is saved and loaded?

    python benchmarks/bench_checkpoint.py [--folder DIR] [--rounds 7] [--gigabytes 1.0] [--cold]

One rank saves with Megatron's writer (the LLM suite) and with torch's (the multimodal suite), with
digests and without, and loads by the suites' own classes, verified and with --no-verify,
alternately on the same disk. Saves are durable; loads read from the page cache and, with --cold,
from the disk. Records medians and the ratio of the means of the fastest halves.
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
from mindspeed.checkpoint.dcp_writer import DigestWriter
from mindspeed.checkpoint.digests import write_digests

TENSOR = 16 << 20
"""Bytes of each tensor."""
LOADS = 3
"""Loads of each kind for one save."""
CACHES = Path("/proc/sys/vm/drop_caches")


def tensors(gigabytes):
    """Return random float32 weights."""
    count = max(2, round(gigabytes * 1e9 / TENSOR))
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(TENSOR // 4, generator=generator)
    return {f"w{number}": first.roll(number).reshape(1024, -1) for number in range(count)}


class Model(torch.nn.Module):
    """Weights alone: what a load does besides reading takes no time here."""

    def __init__(self, state):
        super().__init__()
        for name, values in state.items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty_like(values)))

    def sharded_state_dict(self):
        """Return the weights as Megatron's models do."""
        return sharded({name: values.detach() for name, values in self.named_parameters()})

    def reload_model_params(self):
        """Have no optimizer whose masters would be copied."""


def sharded(state):
    """Return tensors that one rank holds as a whole."""
    from megatron.core.dist_checkpointing import ShardedTensor

    return {n: ShardedTensor.from_rank_offsets(n, values) for n, values in state.items()}


class Multimodal:
    """Saves and loads as the multimodal suite does."""

    def __init__(self, state):
        from mindspeed_mm.training.checkpoint import MODEL, FsdpCheckpoints

        self._state = {MODEL + name: values for name, values in state.items()}
        self.model = Model(state)
        self.load = FsdpCheckpoints(None, self.model, None).load

    def save(self, folder, has_digests):
        """Save durably."""
        writer = DigestWriter(folder) if has_digests else dcp.FileSystemWriter(folder)
        dcp.save(self._state, storage_writer=writer)
        if has_digests:
            write_digests(folder, writer.files, {})


class Llm:
    """Saves and loads as the LLM suite does."""

    def __init__(self, state):
        from mindspeed_llm.training.checkpoint import MegatronCheckpoints
        from mindspeed_llm.training.model import ModelRole, RoleModel

        self._state, self.model = state, Model(state)
        role = RoleModel(ModelRole("policy"), None, [self.model], [], self.model)
        self.load = MegatronCheckpoints(None, [role]).load

    def save(self, folder, has_digests):
        """Save durably, by two processes."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        from mindspeed_llm.training.checkpoint import _save_strategy

        folder.mkdir()
        written = {}
        plain = TorchDistSaveShardedStrategy("torch_dist", 1)
        strategy = _save_strategy(written) if has_digests else plain
        dist_checkpointing.save(sharded(self._state), str(folder), strategy)
        if has_digests:
            write_digests(folder, written, {})


def drop_caches():
    """Let the next load read from the disk."""
    os.sync()
    try:
        CACHES.write_text("3\n")
    except OSError as error:
        raise SystemExit(
            f"--cold: {CACHES} cannot be written ({error.strerror}): only root of the host may "
            "empty the page cache; leave --cold out to measure loads from the page cache"
        ) from None


def timed(function, *arguments, **named):
    """Return the seconds of a call."""
    start = time.perf_counter()
    function(*arguments, **named)
    return time.perf_counter() - start


def measure(root, suite, state, rounds, is_cold):
    """Measure alternately; return a row."""
    kinds = ["load", "cold_load"] if is_cold else ["load"]
    times = {kind: ([], []) for kind in ("save", *kinds)}
    for repeat in range(-1, rounds):  # the first one warms up
        order = (0, 1) if repeat % 2 else (1, 0)
        for has_digests in order:
            saved = timed(suite.save, root / f"{repeat}-{has_digests}", has_digests)
            times["save"][has_digests].append(saved)
        for kind in kinds * LOADS:
            order = order[::-1]
            for is_verified in order:
                if kind == "cold_load":
                    drop_caches()
                how = {"with_optimizer": False, "verify": bool(is_verified)}
                times[kind][is_verified].append(timed(suite.load, root / f"{repeat}-1", **how))
        if repeat < 0:
            times = {kind: ([], []) for kind in times}
            assert all(torch.equal(suite.model.get_parameter(n), v) for n, v in state.items())
        for name in (f"{repeat}-0", f"{repeat}-1"):
            shutil.rmtree(root / name)
    size = sum(values.nbytes for values in state.values())
    row = {"suite": type(suite).__name__.lower(), "gb": f"{size / 1e9:.2f}"}
    for kind in ("save", "load", "cold_load"):
        without, with_digests = times.get(kind, ((), ()))
        row[f"{kind}_s"] = f"{statistics.median(without):.3f}" if without else ""
        row[f"{kind}_digests_s"] = f"{statistics.median(with_digests):.3f}" if without else ""
        ratio = fastest(with_digests) / fastest(without) if without else 0
        row[f"{kind}_ratio"] = f"{ratio:.3f}" if without else ""
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
    parser.add_argument("--cold", action="store_true", help="also empty the page cache; as root")
    options = parser.parse_args()
    if options.cold:
        drop_caches()
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    state, rows = tensors(options.gigabytes), []
    for suite in (Llm, Multimodal):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            row = measure(Path(name), suite(state), state, options.rounds, options.cold)
            rows.append(row)
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    record("checkpoint", rows)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
