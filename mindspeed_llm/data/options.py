"""The options of preprocessing; the names are those of the flags."""

from typing import Literal

from mindspeed.config import ConfigError, Options


class PreprocessOptions(Options):
    """Everything that decides the output of `preprocess_data.py`."""

    input: str | None = None
    """Data: a json, jsonl, parquet, csv, tsv or txt file, a folder of them, or several separated by
    commas."""
    output_prefix: str | None = None
    """Path and prefix of the output files: out/data gives out/data_..._document. Training takes the
    same prefix."""
    tokenizer_name_or_path: str | None = None
    """Folder of a Hugging Face model (or a .gguf file) whose tokenizer to use."""
    tokenizer_type: str = "PretrainedFromHF"
    """Kind of tokenizer; only Hugging Face tokenizers are supported."""
    tokenizer_not_use_fast: bool = False
    """Accepted for existing scripts: fast and slow tokenizers give the same ids."""
    trust_remote_code: bool = False
    """Run Python code that comes with the tokenizer. Only for folders you trust."""
    handler_name: str = "GeneralPretrainHandler"
    """Layout of the records: plain documents, or one of the instruction, pairwise, reward and
    prompt layouts."""
    json_keys: tuple[str, ...] = ("text",)
    """Columns with documents (GeneralPretrainHandler); each gets files of its own."""
    map_keys: str | None = None
    """Columns of the data as JSON: {"prompt": "question", "query": "", "response": "answer"}. An
    empty name switches a column off."""
    prompt_type: str | None = None
    """Chat template by name; `empty` if the data has it already, `tokenizer` for the tokenizer's
    own."""
    prompt_type_path: str | None = None
    """File of templates (default: configs/finetune/templates.json)."""
    enable_thinking: Literal["true", "false", "none"] = "none"
    """Thoughts of reasoning templates: true prepends an empty thought to answers without one, and
    trains it; false removes thoughts; none keeps them."""
    special_tokens: Literal["auto", "parse", "text"] = "auto"
    """Special tokens spelled out in the data: parse makes them tokens, text leaves them text. auto
    parses with --prompt-type empty only."""
    seq_length: int | None = None
    """Longest sample, in tokens; --too-long decides about longer ones."""
    too_long: Literal["drop", "cut", "error"] = "drop"
    """Samples longer than --seq-length, packed or not: drop and count them; cut them, which may
    remove the end of answers; or error: stop at the first one."""
    pack: bool = False
    """Fill rows of --seq-length tokens with several samples."""
    neat_pack: bool = False
    """With --pack: separate the samples of a row (the attention mask counts them)."""
    append_eod: bool = False
    """Append the end-of-text token to every document or sample."""
    placeholder_token: str = "ки"
    """Token after each step of a solution (process reward)."""
    reward_tokens: tuple[str, ...] = ()
    """Tokens that may be a verdict (process reward), such as + -."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """Malformed records: stop at the first one, or skip and count them."""
    workers: int = 1
    """Processes that encode; never more than this machine has cores."""
    n_subs: int = 1
    """Parts of the data processed at once: the same as --workers (the larger counts). The output
    does not depend on either."""
    log_interval: int = 100
    """Minimum number of records between two progress lines."""
    cache_dir: str | None = None
    """Folder for what is computed once: descriptions of tokenizers and, in training, preprocessed
    data files and which token files were checked (default: ~/.cache/mindspeed)."""
    accelerator: Literal["auto", "off"] = "auto"
    """Use gigatoken if it is installed and gives the same ids as the tokenizer."""
    merge_group_keys: tuple[str, ...] = ()
    """Instead of preprocessing, merge the .bin/.idx pairs in the folder --input whose names contain
    a key, into one pair per key."""
    dataset_impl: Literal["mmap", "lazy", "cached"] = "mmap"
    """Accepted for existing scripts: there is one output format."""
    overwrite_cache: bool = False
    """Accepted for existing scripts: nothing of the data is cached."""
    streaming: bool = False
    """Accepted for existing scripts: data is always streamed."""


def check_options(options: PreprocessOptions) -> None:
    """Refuse options that do not work together."""
    if options.tokenizer_type != "PretrainedFromHF":
        raise ConfigError(
            f"--tokenizer-type {options.tokenizer_type} is not supported: use PretrainedFromHF"
        )
    for name in ("placeholder_token", "reward_tokens", "json_keys", "map_keys", "prompt_type"):
        if any("\ud800" <= letter <= "\udfff" for letter in "".join(getattr(options, name) or ())):
            raise ConfigError(f"--{name.replace('_', '-')} is not UTF-8 text")
    for name in ("workers", "n_subs", "log_interval", "seq_length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} is too small: give 1 or more")
    if options.neat_pack and not options.pack:
        raise ConfigError("--neat-pack needs --pack: give both, or drop --neat-pack")
    if options.pack and options.seq_length is None:
        raise ConfigError("--pack needs --seq-length: the length of the rows to fill")
    if not options.json_keys or len(set(options.json_keys)) < len(options.json_keys):
        raise ConfigError("--json-keys: name each column once")
