"""Run the pretraining scripts of a Megatron-LM checkout on cpu, with the one line added.

    python scripts/megatron_scripts.py CHECKOUT --output table.md

Each case trains 20 iterations, saves at the 10th, and goes on from there in a second run that has
to print the same losses.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_inputs import checkout

LINE = "import mindspeed.megatron_adaptor"
ITERATION = re.compile(r"iteration +(\d+)/.*?lm loss: ([0-9.E+-]+)")
MODEL = """
    --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --micro-batch-size 2
    --global-batch-size 8 --train-iters 20 --lr 1e-3 --lr-decay-style constant --log-interval 1
    --eval-iters 1 --eval-interval 1000 --num-workers 0 --seed 7 --save-interval 10
"""
MOCK_DATA = """
    --num-layers 4 --seq-length 32 --mock-data --tokenizer-type NullTokenizer --vocab-size 4991
"""
WORDS = """
    --tokenizer-type BertWordPieceLowerCase --split 90,5,5
    --data-path {folder}/words --vocab-file {folder}/words.txt --data-cache-path {folder}/cache
"""
T5 = """
    --encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 32 --decoder-seq-length 16
    --kv-channels 16 --ffn-hidden-size 128 --vocab-extra-ids 50
"""
MAMBA = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"


@dataclass(frozen=True)
class Case:
    """One way to start a script."""

    name: str
    ranks: int
    arguments: str
    script: str = "pretrain_gpt.py"


TWO_STAGES = "--pipeline-model-parallel-size 2"
EXPERTS = """
    --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --disable-bias-linear
    --moe-token-dispatcher-type alltoall
"""
# Rotary embedding: losses have to be the same for every size. Learned positions differ on a cpu:
# Megatron's warm-up of its fused functions draws numbers of the size of a rank's sequence before.
SPLIT = f"""{MOCK_DATA} --attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope
    --context-parallel-size"""
CASES = (
    Case("TE spec", 1, f"{MOCK_DATA} --transformer-impl transformer_engine"),
    Case("local spec", 1, f"{MOCK_DATA} --transformer-impl local"),
    Case("bf16", 1, f"{MOCK_DATA} --bf16"),
    Case("`torch` checkpoint", 1, f"{MOCK_DATA} --ckpt-format torch"),
    Case("TP 2", 2, f"{MOCK_DATA} --tensor-model-parallel-size 2"),
    Case("PP 2", 2, f"{MOCK_DATA} {TWO_STAGES}"),
    Case(
        "TP 2, PP 2, SP",
        4,
        f"{MOCK_DATA} --tensor-model-parallel-size 2 {TWO_STAGES} --sequence-parallel",
    ),
    Case("no dropout, CP 1", 1, f"{SPLIT} 1"),
    Case("CP 2", 2, f"{SPLIT} 2"),
    Case("CP 2, `--cp-comm-type a2a`", 2, f"{SPLIT} 2 --cp-comm-type a2a"),
    Case("CP 2, `--cp-comm-type all_gather`", 2, f"{SPLIT} 2 --cp-comm-type all_gather"),
    Case("CP 2, a type for each layer", 2, f"{SPLIT} 2 --cp-comm-type p2p a2a all_gather p2p"),
    Case("CP 2, KV all-gather", 2, f"{SPLIT} 2 --context-parallel-algo kvallgather_cp_algo"),
    Case("CP 2, local spec", 2, f"{SPLIT} 2 --transformer-impl local"),
    Case("no dropout, CP 1, PP 2", 2, f"{SPLIT} 1 {TWO_STAGES}"),
    Case("CP 2, PP 2", 4, f"{SPLIT} 2 {TWO_STAGES}"),
    Case(
        "CP 4, hybrid",
        4,
        f"{SPLIT} 4 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2",
    ),
    Case(
        "CP 4, `--cp-comm-type a2a+p2p`",
        4,
        f"{SPLIT} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    ),
    Case("CP 4, double ring", 4, f"{SPLIT} 4 --cp-window-size 2"),
    Case("PP 2, VPP 2", 2, f"{MOCK_DATA} {TWO_STAGES} --num-layers-per-virtual-pipeline-stage 1"),
    Case("MoE, EP 2", 2, f"{MOCK_DATA} {EXPERTS}"),
    Case(
        "MoE, EP 2, grouped, bf16",
        2,
        f"{MOCK_DATA} {EXPERTS} --moe-grouped-gemm --bf16",
    ),
    Case(
        "distributed optimizer, overlaps, bf16",  # in fp32 core_v0.16.1 cannot load its own file
        2,
        f"{MOCK_DATA} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
        " --bf16",
    ),
    Case(
        "`--optimization-level 2`",
        1,
        f"{MOCK_DATA} --swiglu --use-fused-swiglu --optimization-level 2",
    ),
    Case("BERT", 1, f"{WORDS} --num-layers 2 --seq-length 32", "pretrain_bert.py"),
    Case("T5", 1, f"{WORDS} {T5}", "pretrain_t5.py"),
    Case("Mamba", 1, f"{MOCK_DATA} {MAMBA} --hybrid-override-pattern MMMM", "pretrain_mamba.py"),
)


def main() -> int:
    """Run the cases and print a table of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=checkout, help="folder of Megatron-LM")
    parser.add_argument("--output", type=Path, help="file for the table")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of the cases")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one run may take")
    options = parser.parse_args()
    rows = [
        "| case | ranks | loss 1 | loss 20 | from the save on |",
        "| --- | --- | --- | --- | --- |",
    ]
    print("\n".join(rows))
    for case in CASES:
        if any(part in case.name for part in options.only):
            rows.append(row(case, options.checkout, options.timeout))
            print(rows[-1], flush=True)
    if options.output:
        options.output.write_text("\n".join([*rows, ""]))
    return 0


def row(case: Case, checkout: Path, timeout: float) -> str:
    """Train, go on from the save, and say how that went."""
    start = f"| {case.name} | {case.ranks} |"
    with tempfile.TemporaryDirectory(prefix="megatron_scripts_") as name:
        folder = Path(name)
        runs = Runs(case, checkout, folder, timeout)
        if "{folder}" in case.arguments:
            runs.python("-c", WRITE_WORDS, str(folder))
        whole, said = runs.losses()
        if 20 not in whole:
            return f"{start} | | {said} |"
        (folder / "saved" / "latest_checkpointed_iteration.txt").write_text("10")
        rest, said = runs.losses()
        rest = from_save_on(rest)
        if rest:
            said = "the same losses" if rest == from_save_on(whole) else f"other losses: {rest}"
        return f"{start} {float(whole[1]):.4f} | {float(whole[20]):.4f} | {said} |"


def from_save_on(losses: dict[int, str]) -> dict[int, str]:
    """Keep what two runs share: Megatron's second line is the mean of a run's first two steps."""
    return {step: loss for step, loss in losses.items() if step > 10 and step != 12}


@dataclass(frozen=True)
class Runs:
    """The runs of one case, which share a folder."""

    case: Case
    checkout: Path
    folder: Path
    timeout: float

    def losses(self) -> tuple[dict[int, str], str]:
        """Run the script; return its losses by iteration and, if it failed, its last words."""
        script = self.folder / self.case.script
        script.write_text("".join(with_line(self.checkout / self.case.script)))
        arguments = shlex.split((MODEL + self.case.arguments).format(folder=self.folder))
        saved = ["--save", str(self.folder / "saved"), "--load", str(self.folder / "saved")]
        launcher = ["-m", "mindspeed", "run", "--all-ranks", "--nproc", str(self.case.ranks)]
        limit = ["--timeout", str(self.timeout)]
        result = self.python(*launcher, *limit, str(script), *arguments, *saved, *self._offline())
        found = {int(step): loss for step, loss in ITERATION.findall(result.stdout)}
        errors = re.findall(r"\b(\w+(?:Error|Exception): .*)", result.stdout)
        return found, errors[-1][:200] if errors else f"exit code {result.returncode}"

    def _offline(self) -> list[str]:
        """Ask for the tokenizers that read a vocabulary file where newer ones download it."""
        flag = "--legacy-tokenizer"
        known = (self.checkout / "megatron/training/arguments.py").read_text()
        return [flag] if "--vocab-file" in self.case.arguments and flag in known else []

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Start Python with the checkout in its path, out of the checkout's own folder."""
        paths = [str(self.checkout), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        return subprocess.run(
            [sys.executable, "-W", "ignore", *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


def with_line(script: Path) -> Iterator[str]:
    """Yield the lines of a script with ours under `import torch`."""
    for line in script.read_text().splitlines(keepends=True):
        yield line
        if line.strip() == "import torch":
            yield f"{LINE}\n"


WRITE_WORDS = """
import sys, numpy, torch
import mindspeed.megatron_adaptor
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
folder = sys.argv[1]
words = [a + b for a in "abcd" for b in "abcdefghijklmnopqrstuvwxyz"][:91]
with open(folder + "/words.txt", "w") as vocabulary:
    vocabulary.write("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
draw = numpy.random.default_rng(0)
builder = IndexedDatasetBuilder(folder + "/words.bin", dtype=numpy.uint16)
for _ in range(200):
    starts = draw.integers(5, 85, size=4)
    sentences = [torch.arange(start, start + draw.integers(6, 12)) for start in starts]
    builder.add_document(torch.cat(sentences), [len(sentence) for sentence in sentences])
builder.finalize(folder + "/words.idx")
"""
"""Documents of a few sentences over a small vocabulary, for the scripts that take no mock data."""


if __name__ == "__main__":
    sys.exit(main())
