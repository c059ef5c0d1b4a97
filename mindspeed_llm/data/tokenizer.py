"""Tokenizers as plain data: what encoding needs, read once through transformers.

transformers costs a second and hundreds of megabytes in every worker, so a subprocess reads the
tokenizer, and the result is cached until the tokenizer's files change.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mindspeed.checkpoint.commit import atomic_write
from mindspeed.config import ConfigError, one_of, parse_json

logger = logging.getLogger(__name__)

VOCABULARIES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*", "tekken.json")
"""Every tokenizer has one of these files; without it transformers asks for other packages."""
FORMAT = 3
"""Incremented when `TokenizerFacts` changes, so that no stale cache entry is read."""


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer as data: the content of its tokenizer.json and the names of its tokens."""

    source: str
    backend: str = field(repr=False)
    size: int
    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    special: dict[str, int] = field(default_factory=dict)
    """Every special token and its id."""
    added: dict[str, int] = field(default_factory=dict)
    """Every added token, special or not, and its id."""
    strip_before: tuple[int, ...] = ()
    """Tokens that strip the white space before them."""
    strip_after: tuple[int, ...] = ()
    """Tokens that strip the white space after them."""
    chat_template: str | None = field(default=None, repr=False)
    tool_template: str | None = field(default=None, repr=False)
    """The chat template for conversations with tools, if it is a separate one."""
    has_prefix: bool = False
    """Whether a space is prepended to a text."""
    prefixes_sections: bool = False
    """Whether a text after a special token gets that space too, not only the first text."""

    def id_of(self, token: str | None) -> int | None:
        """Return the id of a special or added token, None for other text."""
        return self.added.get(token) if token is not None else None

    @property
    def eos_id(self) -> int | None:
        """The id of the end-of-text token."""
        return self.id_of(self.eos)

    @property
    def pad_id(self) -> int:
        """The id to pad with: the tokenizer's own, else the end of text, else 0."""
        pad = self.id_of(self.pad)
        return next((one for one in (pad, self.eos_id) if one is not None), 0)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything about this tokenizer but its path."""
        others = asdict(self) | {"source": "", "backend": ""}
        content = json.dumps(others, sort_keys=True) + self.backend
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @cached_property
    def ids_fingerprint(self) -> str:
        """A digest of every token and its id: of what a model depends on, no chat template."""
        from tokenizers import Tokenizer

        ids = Tokenizer.from_str(self.backend).get_vocab(with_added_tokens=True)
        return hashlib.sha256(json.dumps(ids, sort_keys=True).encode()).hexdigest()[:16]


def special_matcher(facts: TokenizerFacts) -> re.Pattern[str] | None:
    """Return a pattern of the tokenizer's special tokens, None if it has none."""
    longest_first = sorted(facts.special, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def split_special(
    text: str, special: re.Pattern[str] | None, facts: TokenizerFacts
) -> list[str | int]:
    """Split a text at special tokens, which become ids."""
    if special is None:
        return [text] if text else []
    parts = special.split(text)
    return [facts.special[p] if i % 2 else p for i, p in enumerate(parts) if p]


def facts_of(tokenizer: Any, source: str = "") -> TokenizerFacts:
    """Describe a transformers tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"{source}: this tokenizer has no fast form: a tokenizer.json is needed beside it"
        )
    tokens = tokenizer.added_tokens_decoder
    template = tokenizer.chat_template
    named = template if isinstance(template, dict) else {"default": template}
    content = backend.to_str()
    return TokenizerFacts(
        source=source,
        backend=content,
        size=len(tokenizer),
        bos=tokenizer.bos_token,
        eos=tokenizer.eos_token,
        pad=tokenizer.pad_token,
        special={token.content: number for number, token in tokens.items() if token.special},
        added={token.content: number for number, token in tokens.items()},
        strip_before=tuple(number for number, token in tokens.items() if token.lstrip),
        strip_after=tuple(number for number, token in tokens.items() if token.rstrip),
        chat_template=named.get("default"),
        tool_template=named.get("tool_use"),
        **_prefix_facts(json.loads(content)),
    )


def _prefix_facts(content: dict[str, Any]) -> dict[str, bool]:
    schemes = {step.get("prepend_scheme") for step in _steps(content, "pre_tokenizer")}
    has_prefix = remove_prefix(content)
    return {"has_prefix": has_prefix, "prefixes_sections": has_prefix and "first" not in schemes}


def remove_prefix(content: dict[str, Any]) -> bool:
    """Remove the steps that prepend a space to a text; return whether there was one."""
    changed = False
    for step in _steps(content, "pre_tokenizer"):
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            step["prepend_scheme"], changed = "never", True
        if step["type"] == "ByteLevel" and step.get("add_prefix_space"):
            step["add_prefix_space"], changed = False, True
    for step in _steps(content, "normalizer"):
        if step["type"] == "Prepend":
            step["prepend"], changed = "", True
    return changed


def _steps(content: dict[str, Any], stage: str) -> list[dict[str, Any]]:
    step = content.get(stage)
    if not step:
        return []
    if step["type"] != "Sequence":
        return [step]
    return list(step.get("pretokenizers") or step.get("normalizers") or [])


def load_facts(
    path: str | None, *, cache_dir: str | None = None, trust_remote_code: bool = False
) -> TokenizerFacts:
    """Describe the tokenizer in a folder of Hugging Face files (or in a .gguf file)."""
    path = _check_path(path)
    cache_file = _cache_dir(cache_dir) / f"{_files_key(path, trust_remote_code)}.json"
    found = _read_cache(cache_file)
    if found is None:
        found = _describe_in_subprocess(path, trust_remote_code)
        _write_cache(cache_file, found)
    lists = {name: tuple(found[name]) for name in ("strip_before", "strip_after")}
    return TokenizerFacts(**{**found, **lists, "source": path})


def _write_cache(cache_file: Path, found: dict[str, Any]) -> None:
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(cache_file, json.dumps(found).encode())
    except OSError as error:
        logger.warning("cannot cache the tokenizer: %s: %s", cache_file, error.strerror)


def _read_cache(cache_file: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = parse_json(cache_file.read_bytes())
        TokenizerFacts(**found)
        return found
    except (OSError, ValueError, TypeError):
        return None


def has_tokenizer(folder: Path) -> bool:
    """Return whether there is a tokenizer among the files of a folder."""
    return any(any(folder.glob(name)) for name in VOCABULARIES)


def _check_path(path: str | None) -> str:
    if not path:
        raise ConfigError(
            "--tokenizer-name-or-path is missing: give the folder of a Hugging Face model"
        )
    folder = Path(path)
    try:
        folder.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long for a name, or not one
        raise ConfigError(f"--tokenizer-name-or-path {path[:200]}: {error.args[-1]}") from None
    if folder.is_file() and folder.suffix == ".gguf":
        return path
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(
            f"--tokenizer-name-or-path {path} {what}: give a folder with a tokenizer.json"
        )
    if not has_tokenizer(folder):
        raise ConfigError(
            f"--tokenizer-name-or-path {path} holds no tokenizer (no {one_of(VOCABULARIES)}): give "
            "a folder with a tokenizer.json"
        )
    return path


def _cache_dir(cache_dir: str | None) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache_dir or f"{base}/mindspeed").expanduser() / "tokenizers"


def _files_key(path: str, trust_remote_code: bool) -> str:
    """Return a digest of the state of the tokenizer's files and of the code that reads them."""
    given = Path(path)
    files = [given] if given.is_file() else sorted(given.iterdir())
    small = [f for f in files if f.is_file() and f.suffix not in (".safetensors", ".bin", ".pt")]
    states = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in small]
    version = importlib.metadata.version("transformers")
    key = json.dumps([FORMAT, version, trust_remote_code, str(given.resolve()), states])
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def _describe_in_subprocess(path: str, trust_remote_code: bool) -> dict[str, Any]:
    logger.info("reading the tokenizer in %s (cached until its files change)", path)
    command = [sys.executable, "-m", __spec__.name, path, "1" if trust_remote_code else ""]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason was given"]
        hint = "" if "trust_remote_code" not in done.stderr else " (see --trust-remote-code)"
        raise ConfigError(
            f"--tokenizer-name-or-path {path} cannot be loaded by transformers: {lines[-1]}{hint}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _main(path: str, trust_remote_code: str) -> None:
    """Print the facts of one tokenizer as a line of JSON."""
    if not trust_remote_code and not path.endswith(".gguf"):
        # A tokenizer needs no torch, and transformers starts four times as fast without it.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from transformers import AutoTokenizer

    options: dict[str, Any] = {
        "local_files_only": True,
        "trust_remote_code": bool(trust_remote_code),
    }
    if path.endswith(".gguf"):
        path, options["gguf_file"] = os.path.split(path)
    facts = facts_of(AutoTokenizer.from_pretrained(path or ".", **options), path)
    sys.stdout.write("\n" + json.dumps(asdict(facts)) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
