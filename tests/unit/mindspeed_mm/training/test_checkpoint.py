"""What a checkpoint may hold: tensors of this model, and nothing that runs."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from mindspeed.config import ConfigError
from mindspeed.training.checkpoint_dir import find_resume, resume
from mindspeed_mm.training.checkpoint import FsdpCheckpoints, weights_of
from mindspeed_mm.training.options import MmOptions

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Tied(nn.Module):
    """Two names for one weight, and a buffer that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))


def load(folder: Path, with_optimizer: bool = False) -> Tied:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    FsdpCheckpoints(None, model, optimizer).load(folder, with_optimizer=with_optimizer)
    return model


def save(folder: Path, **state: Any) -> Path:
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder


def test_tied_weights_are_kept_once_and_found_under_either_name(tmp_path: Path) -> None:
    assert list(weights_of(Tied())) == ["scale", "embed.weight"]
    values = {"model.scale": torch.zeros(2), "model.embed.weight": torch.rand(5, 3)}
    other = {"model.scale": torch.zeros(2), "model.head.weight": values["model.embed.weight"]}
    for number, state in enumerate((values, other, values | other)):
        model = load(save(tmp_path / str(number), **state))
        assert torch.equal(model.head.weight, values["model.embed.weight"])
        assert model.embed.weight is model.head.weight and not model.scale.any()


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"model.scale": torch.ones(2)}, "has no model.embed.weight: it is of another model"),
        ({"model.emebd.weight": torch.ones(1)}, "did you mean"),
        ({"model.extra": torch.ones(1)}, "holds model.extra"),
        ({"model.embed.weight": torch.ones(4, 3)}, r"the shape \(4, 3\), the model wants \(5, 3\)"),
        ({"model.embed.weight": "text, so a pickle"}, "has no model.embed.weight"),
        ({"model.embed.lora_A.default.weight": torch.ones(1)}, "by mindspeed-mm convert$"),
        ({"optimizer.embed.weight.momentum": torch.ones(1)}, "give --no-load-optim"),
    ],
)
def test_a_mismatch_is_an_error(tmp_path: Path, state: dict[str, Any], match: str) -> None:
    whole = {"model.scale": torch.ones(2), "model.embed.weight": torch.ones(5, 3)}
    if match.startswith("has no model.embed.weight: it") or "did you mean" in match:
        del whole["model.embed.weight"]
    with pytest.raises(ConfigError, match=match):
        load(save(tmp_path / "saved", **whole | state), with_optimizer=True)


class Bad:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


def test_code_in_the_metadata_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", **{"model.scale": torch.ones(2)})
    (folder / ".metadata").write_bytes(pickle.dumps(Bad(f"touch {tmp_path}/ran")))
    with pytest.raises(ConfigError, match="refused"):
        load(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("is_there", [True, False], ids=["cut off", "gone"])
def test_damaged_files_are_one_line(tmp_path: Path, is_there: bool) -> None:
    state = {"model.scale": torch.ones(2), "model.embed.weight": torch.ones(5, 3)}
    folder = save(tmp_path / "saved", **state)
    (file,) = folder.glob("*.distcp")
    if is_there:
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
    with pytest.raises(ConfigError, match="0.distcp: "):
        load(folder)


@pytest.mark.parametrize("said", ["7", "seven", "\xff"], ids=["gone", "no number", "no text"])
def test_a_folder_whose_training_is_lost_is_not_overwritten(tmp_path: Path, said: str) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text(said, encoding="latin-1")
    options = MmOptions(save=str(tmp_path))
    with pytest.raises(ConfigError, match="no training checkpoint of that name: correct it"):
        find_resume(options)
    assert find_resume(options.model_copy(update={"no_auto_resume": True})) is None
    assert find_resume(options.model_copy(update={"load": str(tmp_path)})) is None, (
        "asked for by name"
    )
    tracker.write_text("release\n")
    assert find_resume(options) is None


def test_an_older_checkpoint_is_named_only_where_it_would_help(tmp_path: Path) -> None:
    model = Tied()
    checkpoints = FsdpCheckpoints(None, model, torch.optim.AdamW(model.parameters()))
    state = {"model.scale": torch.ones(2), "model.embed.weight": torch.ones(4, 3)}
    for number in (1, 2):
        folder = save(tmp_path / f"iter_000000{number}", **state)
        (folder / "training.json").write_text(f'{{"iteration": {number}, "has_optimizer": false}}')
    with pytest.raises(ConfigError, match=r"the model wants \(5, 3\)$"):
        resume(checkpoints, folder, MmOptions())
    next(folder.glob("*.distcp")).unlink()
    with pytest.raises(ConfigError, match="to resume from iteration 1, put 1 into"):
        resume(checkpoints, folder, MmOptions())
