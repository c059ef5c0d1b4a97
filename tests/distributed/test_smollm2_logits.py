"""A real model: SmolLM2-135M gives the logits of transformers at every layout."""

import pytest
import torch

from mindspeed_llm.checkpoint import ConvertOptions
from tests.llm.megatron_logits import all_logits
from tests.ranks import run_ranks

TOLERANCE = 1e-4  # logits reach 35, and transformers' own float32 is 8e-5 from its float64
TOKENS = torch.tensor(
    [  # two questions in the model's chat format
        [1, 4093, 198, 10576, 4150, 260, 1238, 24630, 28, 284, 281, 527]
        + [713, 436, 357, 808, 4940, 47, 2, 198, 1, 520, 9531, 198],
        [1, 4093, 198, 36971, 281, 827, 8545, 1701, 260, 6376, 314, 4461]
        + [981, 260, 1194, 284, 2382, 418, 33937, 30, 2, 198, 1, 520],
    ]
)


@pytest.fixture(scope="module")
def model(smollm2):
    """Return the model's folder and what transformers says about TOKENS."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.no_grad():
        return smollm2, reference.eval()(TOKENS).logits


@pytest.mark.parametrize("tp, pp", [(1, 1), (3, 1), (1, 2), (3, 2)], ids=str)
def test_logits(model, tmp_path, tp, pp):
    from mindspeed_llm.checkpoint.conversion import convert

    folder, expected = model
    convert(
        ConvertOptions(
            load_dir=str(folder),
            save_dir=str(tmp_path / "mcore"),
            target_tensor_parallel_size=tp,
            target_pipeline_parallel_size=pp,
        )
    )
    case = {
        "source": str(tmp_path / "mcore"),
        "config_folder": str(tmp_path / "mcore" / "hf"),
        "tp": tp,
        "pp": pp,
        "tokens": TOKENS,
    }
    cases = [case, case | {"impl": "transformer_engine"}]
    for outputs in zip(*run_ranks(all_logits, tp * pp, cases, timeout=280)):
        found = [output for output in outputs if output is not None]
        assert len(found) == tp
        for output in found:
            assert (output - expected).abs().max() < TOLERANCE
