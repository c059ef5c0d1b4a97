"""mindspeed_mm on a GPU: a tiny Qwen2.5-VL as on the cpu, saved, resumed, offloaded, adapted."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mindspeed import device
from mindspeed_mm.models.fused_ops import _attend_packed, fuse
from tests.gpu.launched import last_lines
from tests.mm import runs, tiny
from tests.unit.mindspeed_llm.training.tiny_run import read_checkpoint

pytestmark = pytest.mark.gpu
SAME = (
    "plain",
    "meta",
    "recompute",
    "recompute non-reentrant",
    "offload",
    "offload from meta",
    "converted",
)
STEPS = 5
SCRIPT = """
import mindspeed.megatron_adaptor
from tests.gpu.mm_cases import run_all

run_all(sys.argv[1])
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train everything in one process: most of its time is its start."""
    if device.current().name != "cuda":  # before the fixture of this folder, which is for a test
        pytest.skip("needs a CUDA device")
    root = tmp_path_factory.mktemp("mm")
    (line,) = last_lines(root, SCRIPT, root)
    name, difference, sharded, offloaded = line.split()
    assert name == "cuda"
    assert float(difference) < 1e-3, "dropout that is computed again drew other numbers"
    # 32 MiB of weights and as much of gradients; offloaded, a layer may still be gathered.
    assert int(sharded) >= 64 << 20 and int(offloaded) <= 12 << 20
    return root


@pytest.fixture(scope="module")
def expected() -> runs.Outcome:
    """Train on the cpu, with transformers and torch only."""
    model = tiny.new_model("qwen2_5_vl").train()
    found = runs.plain_loop(
        model, runs.TinyData("qwen2_5_vl"), lambda m, b: m(**b).loss, steps=STEPS
    )
    found.weights = {f"model.{name}": value for name, value in found.weights.items()}
    return found


@pytest.mark.parametrize("case", SAME)
def test_steps_are_those_of_the_cpu(trained: Path, expected: runs.Outcome, case: str) -> None:
    found = runs.outcome(trained / case)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    assert found.norms == pytest.approx(expected.norms, rel=1e-3)
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        # Adam makes a full step of a gradient that is hardly above the noise.
        torch.testing.assert_close(found.weights[name], value, atol=1e-3, rtol=1e-3, msg=name)


def test_bfloat16_is_near(trained: Path, expected: runs.Outcome) -> None:
    found = runs.outcome(trained / "bf16")
    assert found.losses == pytest.approx(expected.losses, rel=2**-6)
    assert found.losses != pytest.approx(expected.losses, rel=1e-6), "it was computed in float32"
    assert {value.dtype for value in found.weights.values()} == {torch.float32}


def test_a_run_goes_on_bit_for_bit(trained: Path) -> None:
    """From a checkpoint that was written in the background."""
    whole, resumed = (read_checkpoint(trained / name) for name in ("plain", "resumed"))
    assert whole.keys() == resumed.keys()
    assert any(name.endswith("exp_avg_sq") for name in whole)
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
    assert sorted(path.name for path in (trained / "half").glob("iter_*"))[-1] == "iter_0000003"


def test_what_was_trained_is_a_folder_of_transformers(trained: Path) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    weights = runs.outcome_weights(trained / "plain")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(trained / "hf")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[f"model.{name}"]), name


def test_adapters_learn_and_nothing_else(trained: Path, expected: runs.Outcome) -> None:
    pytest.importorskip("peft")
    found, start = runs.outcome(trained / "lora"), tiny.new_model("qwen2_5_vl").state_dict()
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=2**-6), "they add nothing yet"
    assert all(value.any() for name, value in found.weights.items() if ".lora_B." in name)
    stored = read_checkpoint(trained / "lora")
    states = {name for name in stored if name.endswith(".exp_avg")}
    assert len(states) == 2 * 2 * 2 and all(".lora_" in name for name in states)
    for name, value in found.weights.items():
        if ".lora_" not in name:
            plain = name.removeprefix("model.").replace(".base_layer", "")
            assert torch.equal(value, start[plain]), name


def test_a_module_without_mixins_offloads_and_tells_numbers_of_python(trained: Path) -> None:
    found = runs.outcome(trained / "user")
    assert len(found.losses) == 2 and found.losses[1] < found.losses[0]


def test_packed_pictures_are_seen_as_one_by_one() -> None:
    """The kernel for documents of different lengths against transformers' own calls."""
    found = []
    half = torch.bfloat16
    for dtype, is_fused in ((torch.float32, False), (half, False), (half, True)):
        tower = tiny.new_model("qwen2_5_vl").model.visual.to("cuda", dtype)
        if is_fused:
            assert fuse(tower)["attention"]
        pixels = torch.randn(16 + 64, 48, generator=torch.Generator().manual_seed(1))
        grids = torch.tensor([[1, 4, 4], [1, 8, 8]], device="cuda")
        seen = tower(pixels.to("cuda", dtype), grid_thw=grids).pooler_output
        seen.square().sum().backward()
        gradients = [p.grad.float().flatten() for p in tower.parameters()]
        found.append(torch.cat([seen.detach().float().flatten(), *gradients]))
    exact, plain, fused = found
    error = (plain - exact).norm()
    assert error > 0 and (fused - exact).norm() < 2 * error


@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_documents_are_seen_as_their_module_says(is_causal: bool) -> None:
    """One call for all documents against one for each, which takes no longest length."""
    module, bounds = SimpleNamespace(is_causal=is_causal), torch.tensor([0, 8, 24], device="cuda")
    given = [torch.randn(1, 2, 24, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    ends = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    found = _attend_packed(module, *given, None, **ends, max_length_q=16, max_length_k=16)[0]
    expected = _attend_packed(module, *given, None, **ends)[0]
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
