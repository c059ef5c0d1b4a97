"""How fast does raw text become token files, and at what memory, next to other ways to do it?

    python benchmarks/bench_preprocess.py [--corpus text.jsonl] [--tokenizer DIR] [--megatron DIR]
        [--peers DIR]

Every tool runs in a process of its own, on two cores, alternately. Times run from a loaded
tokenizer to finished files. Without arguments the corpus is the text of the installed packages and
the tokenizer is trained on it (minutes; kept in --work). `--megatron` is a checkout of Megatron-LM;
its standard tool is measured too. Its fast tool is measured as what it does: gigatoken on the whole
file, one array, Megatron's builder. Output must be equal, byte by byte, or there is no result; only
that tool may differ in a document of ten thousand, where its tokenizer was not compared with the
real one. The tools need `pip install gigatoken awkward datasets`, here or in the folder --peers; a
tool whose packages are missing is left out.
"""

import argparse
import filecmp
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
CORES = 2
TRAINED = "64000 tokens, cut as Qwen2's, trained here"
"""The name of the tokenizer that this benchmark trains, beside every number."""
SUFFIXES = (".bin", ".idx")
QUESTIONS = ("documents", "large", "instructions")


def make_corpus(path, megabytes):
    """Write the text files of the installed packages as one document a line."""
    size = 0
    with path.open("w") as out:
        for file in sorted(Path(psutil.__file__).parents[1].rglob("*")):
            if file.suffix not in (".py", ".md", ".rst", ".txt", ".h", ".pyi") or size > megabytes:
                continue
            try:
                text = file.read_text()
            except (OSError, UnicodeDecodeError):
                continue
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            size += len(text) / 1e6


def make_tokenizer(folder, corpus):
    """Train a byte-level BPE with Qwen's way to cut words."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=64000, initial_alphabet=alphabet)
    with corpus.open() as lines:
        texts = (json.loads(line)["text"] for line, _ in zip(lines, range(3000)))
        tokenizer.train_from_iterator(texts, trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens(special)
    names = {"eos_token": special[2], "pad_token": special[0]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def make_chat(path, corpus, records):
    """Cut the corpus into questions and answers."""
    done = 0
    with corpus.open() as lines, path.open("w") as out:
        for line in lines:
            words = json.loads(line)["text"].split(" ")
            for start in range(0, min(len(words), 2000) - 200, 200):
                part = words[start : start + 200]
                record = {"prompt": " ".join(part[:50]), "response": " ".join(part[50:])}
                out.write(json.dumps(record) + "\n")
                done += 1
                if done == records:
                    return


# Each tool below runs in its own process and prints the seconds it took, loading the tokenizer
# included, and the tokens it made.


def run_ours(job, accelerator="auto"):
    """Preprocess with this repository."""
    from mindspeed_llm.data.options import PreprocessOptions
    from mindspeed_llm.data.preprocess import preprocess
    from mindspeed_llm.data.tokenizer import load_facts

    chat = {"handler_name": "AlpacaStyleInstructionHandler", "prompt_type": "qwen"}
    options = PreprocessOptions(
        input=job["input"],
        output_prefix=job["output"],
        workers=CORES,
        accelerator=accelerator,
        special_tokens="parse",  # as the others do, so that the output can be equal
        **(chat if job["chat"] else {"append_eod": True}),
    )
    start = time.perf_counter()
    facts = load_facts(job["tokenizer"], cache_dir=job["cache"])
    summary = preprocess(options, facts)
    return time.perf_counter() - start, summary.tokens


def run_whole_file(job):
    """Do what Megatron's fast tool does: gigatoken on the file, one array, Megatron's builder."""
    import awkward as ak
    import gigatoken
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    start = time.perf_counter()
    tokenizer = gigatoken.Tokenizer(job["tokenizer"])
    end = json.loads((Path(job["tokenizer"]) / "tokenizer_config.json").read_text())["eos_token"]
    end_id = tokenizer._special_tokens()[end]
    prefix = f"{job['output']}_text_document"
    source = gigatoken.JsonlFileSource([job["input"]], field="text")
    documents = tokenizer.encode_files(source, parallel=True)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    lengths = np.asarray(ak.num(documents, axis=1))
    flat = np.insert(np.asarray(ak.flatten(documents), dtype=dtype), np.cumsum(lengths), end_id)
    builder.data_file.write(flat.astype(dtype, copy=False).tobytes())
    builder.sequence_lengths.extend((lengths + 1).tolist())
    builder.document_indices.extend(np.arange(1, len(lengths) + 1).tolist())
    builder.finalize(f"{prefix}.idx")
    return time.perf_counter() - start, len(flat)


def run_datasets(job):
    """Render, encode and mask with `datasets.map`, and write the same three files."""
    import numpy as np
    from datasets import load_dataset
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from transformers import AutoTokenizer

    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"

    def encode(batch):
        rows = {"input_ids": [], "attention_mask": [], "labels": []}
        for question, answer in zip(batch["prompt"], batch["response"]):
            asked = f"{system}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            source = tokenizer.encode(asked, add_special_tokens=False)
            target = tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id]
            rows["input_ids"].append(source + target)
            rows["attention_mask"].append([1] * len(source + target))
            rows["labels"].append([-100] * len(source) + target)
        return rows

    data = load_dataset("json", data_files=job["input"], split="train", cache_dir=job["scratch"])
    data = data.map(encode, batched=True, num_proc=CORES, remove_columns=data.column_names)
    tokens = 0
    for key in ("input_ids", "attention_mask", "labels"):
        prefix = f"{job['output']}_packed_{key}_document"
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
        for row in data.with_format("numpy", columns=[key])[key]:
            builder.add_document(row, [len(row)])
            tokens += len(row) if key == "input_ids" else 0
        builder.finalize(f"{prefix}.idx")
    return time.perf_counter() - start, tokens


def run_megatron(job):
    """Run the standard tool of a Megatron-LM checkout, on our adaptor since there is no GPU."""
    import runpy

    sys.path.insert(0, job["megatron"])
    import mindspeed.megatron_adaptor  # noqa: F401

    sys.argv = [
        *("preprocess_data.py", "--input", job["input"], "--output-prefix", job["output"]),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", job["tokenizer"]),
        *("--tokenizer-hf-use-fast", "--workers", str(CORES), "--append-eod"),
    ]
    start = time.perf_counter()
    runpy.run_path(f"{job['megatron']}/tools/preprocess_data.py", run_name="__main__")
    seconds = time.perf_counter() - start
    size = Path(f"{job['output']}_text_document.bin").stat().st_size
    return seconds, size // job["itemsize"]


PACKAGES = {
    "mindspeed-llm": ["gigatoken"],
    "Megatron fast (whole file)": ["gigatoken", "awkward"],
    "datasets.map": ["datasets"],
}
"""What a tool needs beside what `make setup` installs."""
MAY_DIFFER = 1e-4
"""Share of the documents in which the tool on the whole file may differ."""

TOOLS = {
    "mindspeed-llm": run_ours,
    "mindspeed-llm without gigatoken": lambda job: run_ours(job, "off"),
    "Megatron fast (whole file)": run_whole_file,
    "Megatron standard": run_megatron,
    "datasets.map": run_datasets,
}


def run_tool(tool, job):
    """Run one tool in its own process on two cores; return seconds, tokens, cpu and memory."""
    command = [sys.executable, __file__, "--tool", tool, "--job", json.dumps(job)]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:CORES]))
    environment = {**os.environ, "PYTHONPATH": _python_path(job["peers"])}
    before = os.times()
    process = subprocess.Popen(
        ["taskset", "-c", cores, *command], stdout=subprocess.PIPE, text=True, env=environment
    )
    peak = [0]
    watch = threading.Thread(target=_watch, args=(process, peak))
    watch.start()
    out, _ = process.communicate()
    watch.join()
    after = os.times()
    if process.returncode:
        sys.exit(f"{tool} failed")
    seconds, tokens = json.loads(out.splitlines()[-1])
    cpu = sum(after[2:4]) - sum(before[2:4])
    return {"seconds": seconds, "tokens": tokens, "cpu_seconds": cpu, "peak_rss_gb": peak[0] / 1e9}


def _python_path(peers):
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH"), peers]))


def available(tools, peers, skipped):
    """Return the tools whose packages are installed; print which are not."""
    found = []
    for tool in (tool for tool in tools if tool not in skipped):
        code = "; ".join(f"import {name}" for name in PACKAGES.get(tool, ["sys"]))
        command, environment = [sys.executable, "-c", code], {"PYTHONPATH": _python_path(peers)}
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
        if done.returncode == 0:
            found.append(tool)
        else:
            print(f"{tool} is left out: {done.stderr.strip().splitlines()[-1]}", flush=True)
    return found


def _watch(process, peak):
    """Note the largest memory of the process and everything below it."""
    top = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            family = [top, *top.children(recursive=True)]
            peak[0] = max(peak[0], sum(one.memory_info().rss for one in family))
        except psutil.NoSuchProcess:
            pass
        time.sleep(0.05)


def compare(question, tools, job, rounds):
    """Run the tools alternately and print medians and ratios; the outputs must be equal."""
    runs = {tool: [] for tool in tools}
    for number in range(rounds):
        for tool in tools:
            output = str(
                Path(job["work"]) / f"out-{len(question)}-{len(tool)}-{number % 2}" / "data"
            )
            Path(output).parent.mkdir(exist_ok=True)
            runs[tool].append(run_tool(tool, {**job, "output": output}))
            runs[tool][-1]["output"] = output
    ours, rows = sorted(runs[tools[0]], key=lambda run: run["seconds"])[rounds // 2], []
    for tool in tools:
        run = sorted(runs[tool], key=lambda run: run["seconds"])[rounds // 2]
        _check_equal(runs[tools[0]][0]["output"], runs[tool][0]["output"], tool)
        row = {
            "question": question,
            "tokenizer": job["tokenizer_name"],
            "tool": tool,
            "million_tokens_per_s": round(run["tokens"] / run["seconds"] / 1e6, 3),
            "cpu_s_per_million_tokens": round(run["cpu_seconds"] / run["tokens"] * 1e6, 3),
            "peak_rss_gb": round(run["peak_rss_gb"], 3),
            "ours_is_faster_by": round(
                (run["seconds"] / run["tokens"]) / (ours["seconds"] / ours["tokens"]), 2
            ),
            "tokens": run["tokens"],
        }
        rows.append(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return rows


def _check_equal(ours, theirs, tool):
    """Exit if files differ by more than they may."""
    for path in Path(ours).parent.glob("*_document.bin"):
        other = Path(theirs).parent / path.name
        same = (filecmp.cmp(path.with_suffix(e), other.with_suffix(e), False) for e in SUFFIXES)
        if all(same):
            continue
        share = _share_that_differs(path.with_suffix(""), other.with_suffix(""))
        if "whole file" not in tool or share > MAY_DIFFER:
            sys.exit(f"{tool}: {other} is not what {path} is")
        print(f"{tool}: {share:.4%} of the documents differ", flush=True)


def _share_that_differs(ours, theirs):
    from mindspeed_llm.data.indexed import IndexedTokens

    first, second = IndexedTokens(str(ours)), IndexedTokens(str(theirs))
    if len(first) != len(second):
        return 1.0
    return sum((a.tolist() != b.tolist()) for a, b in zip(first, second)) / len(first)


def main():
    """Prepare the data, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--megatron", type=Path)
    parser.add_argument("--peers", default="", help="folder with the packages of other tools")
    parser.add_argument("--work", type=Path, default=Path("/tmp/bench_preprocess"))
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", type=int, default=4, help="how much larger the larger file is")
    parser.add_argument("--only", choices=QUESTIONS, nargs="*", default=QUESTIONS)
    parser.add_argument("--skip", choices=TOOLS, nargs="*", default=[], help="leave out, for time")
    parser.add_argument("--tool", choices=TOOLS, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tool:
        print(json.dumps(TOOLS[args.tool](args.job)))
        return
    args.work.mkdir(exist_ok=True)
    corpus, tokenizer = args.corpus or args.work / "corpus.jsonl", args.tokenizer
    if not corpus.exists():
        make_corpus(corpus, args.megabytes)
    tokenizer = tokenizer or args.work / "tokenizer"
    if not tokenizer.exists():
        make_tokenizer(tokenizer, corpus)
    chat = args.work / "chat.jsonl"
    make_chat(chat, corpus, args.records)
    names = ("cache", "scratch")
    job = {"work": str(args.work), "tokenizer": str(tokenizer), "itemsize": 2, "chat": False}
    job["peers"] = args.peers
    job["tokenizer_name"] = args.tokenizer.name if args.tokenizer else TRAINED
    job |= {name: str(args.work / name) for name in names}
    fast = ["mindspeed-llm", "mindspeed-llm without gigatoken", "Megatron fast (whole file)"]
    if args.megatron:
        job["megatron"] = str(args.megatron)
        fast.append("Megatron standard")
    fast = available(fast, args.peers, args.skip)
    rows = []
    if "documents" in args.only:
        rows += compare("documents", fast, {**job, "input": str(corpus)}, args.rounds)
    if "large" in args.only:
        large, text = args.work / "large.jsonl", corpus.read_bytes()
        with large.open("wb") as file:
            for _ in range(args.times):
                file.write(text)
        name = f"documents, {args.times} x"
        rows += compare(name, fast, {**job, "input": str(large)}, args.rounds)
    if "instructions" in args.only:
        chat_job = {**job, "input": str(chat), "chat": True}
        talk = ["mindspeed-llm", "mindspeed-llm without gigatoken", "datasets.map"]
        talk = available(talk, args.peers, args.skip)
        rows += compare("instructions", talk, chat_job, args.rounds)

    from record import record

    record("preprocess", rows)


if __name__ == "__main__":
    main()
