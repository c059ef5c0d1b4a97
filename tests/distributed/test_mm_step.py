"""Events of a run and their order: callbacks, reductions, NaN steps, evaluations."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.config import ConfigError, build
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed.fsdp import FsdpOptions, shard
from mindspeed.training.loop import NotFinite
from mindspeed.training.metrics import StepResult
from mindspeed_mm.training import get_args, train
from mindspeed_mm.training.callbacks import Callbacks
from mindspeed_mm.training.optimizer import ShardedAdamW
from mindspeed_mm.training.profile import ProfileOptions, ToolConfig, TraceOptions
from mindspeed_mm.training.step import FsdpStep
from tests.mm import runs
from tests.ranks import group_time_outs, run_ranks

SHARDED = {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"]}
IGNORED = -100
STEPS, BATCH, UNITS = 3, 8, 4
"""Two ranks with four micro-batches each; three layers and the root are gathered in turn."""


class Diary:
    """The document's callbacks, in its short form or Megatron's full form; records their calls."""

    def __init__(self, is_full: bool, poison: int | None = None, is_uneven: bool = False) -> None:
        self.events: list[str] = []
        self._poison, self._plain = poison, runs.user_callbacks()
        self._is_full, self._is_uneven = is_full, is_uneven

    def callbacks(self) -> Callbacks:
        def model_provider(pre_process: bool = True, post_process: bool = True) -> Any:
            self.events.append("model_provider")
            model = self._plain.model()
            model.register_forward_pre_hook(lambda *_: self.events.append("model"))
            return model

        def full_data(train_val_test_num_samples: Any) -> Any:
            assert train_val_test_num_samples[0] == STEPS * BATCH
            return short_data()

        def short_data() -> Any:
            self.events.append("train_valid_test_datasets_provider")
            return self._plain.datasets_provider()

        data = full_data if self._is_full else short_data
        return Callbacks(model_provider, data, self.forward_step)

    def get_batch(self, data_iterator: Any) -> Any:
        self.events.append("get_batch")
        return next(data_iterator)

    def forward_step(self, data_iterator: Any, model: Any) -> Any:
        batch = self.get_batch(data_iterator)
        tokens = batch["tokens"]
        return (model(tokens[:, :-1], batch["images"]), tokens[:, 1:]), self.loss_func

    def loss_func(self, output_tensor: Any) -> Any:
        self.events.append("loss_func")
        logits, targets = output_tensor
        if self._is_uneven:
            targets = uneven(targets)
        how = "sum" if self._is_full else "mean"
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=how)
        if loss.requires_grad:
            loss.register_hook(lambda _: self.events.append("backward"))
        if self._poison == get_args().iteration and dist.get_rank() == 1:
            loss = loss * float("nan")
        if not self._is_full:
            return loss
        count = (targets != IGNORED).sum()
        return loss, count, {"loss": torch.stack([loss.detach(), count])}


def uneven(targets: torch.Tensor) -> torch.Tensor:
    """Mask some targets of a sample; its first one decides how many."""
    targets = targets.clone()
    targets[:, : int(targets[0, 0]) % 5] = IGNORED
    return targets


class Reductions(TorchDispatchMode):
    """Counts the collectives that reduce gradients."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name == "c10d::_reduce_scatter_base_"
        return func(*args, **(kwargs or {}))


def flags(folder: str, name: str, **changes: Any) -> dict[str, Any]:
    base = {"train_iters": STEPS, "global_batch_size": BATCH, "eval_iters": 1, "eval_interval": 3}
    return runs.options(Path(folder) / name, **base | changes)


def observe(folder: str) -> dict[str, Any]:
    """Run all cases on one rank."""
    seen: dict[str, Any] = {}
    per_token = {"calculate_per_token_loss": True}
    for name, diary, changes in (
        ("short", Diary(False), {}),
        ("full", Diary(True), {}),
        ("uneven", Diary(True, is_uneven=True), {}),
        ("per token", Diary(True, is_uneven=True), per_token),
    ):
        hook = register_optimizer_step_post_hook(lambda *_, d=diary: d.events.append("update"))
        run = runs.make_run(flags(folder, name, **changes), SHARDED)
        with Reductions() as reductions:
            runs.train_once(run, diary.callbacks())
        hook.remove()
        seen[name] = (diary.events, reductions.count)
    from megatron.training import get_args as of_megatron

    assert of_megatron() is get_args()
    seen["saved"] = _poisoned(folder, "once", 2, max_nan_iterations=2)
    _poisoned(folder, "end", 2, max_nan_iterations=2, train_iters=2)
    with pytest.raises(NotFinite, match="in 1 steps up to iteration 2"):
        _poisoned(folder, "stop", 2, max_nan_iterations=1)
    seen["time-outs"] = _time_outs(folder)
    _trace(folder)
    seen["shown"] = _shown(folder)
    _failed_starts(folder)
    seen["updates"] = [_updates(is_fused) for is_fused in (False, True)]
    return seen


def _poisoned(folder: str, name: str, poison: int, **changes: Any) -> int:
    run = runs.make_run(flags(folder, name, save_interval=1, **changes), SHARDED)
    return runs.train_once(run, Diary(False, poison).callbacks())


def _time_outs(folder: str) -> set[float]:
    """Train with process groups of a device mesh and of an asynchronous save."""
    changes = {"distributed_timeout_minutes": 3, "async_save": True, "train_iters": 1}
    replicated = SHARDED | {"sharding_size": 1}
    runs.train_once(
        runs.make_run(flags(folder, "waits", **changes), replicated), Diary(False).callbacks()
    )
    return group_time_outs()


def _trace(folder: str) -> None:
    steps = TraceOptions(start_step=2, end_step=3, save_path=f"{folder}/traces")
    tool = ToolConfig(profile=ProfileOptions(enable=True, ranks=(1,), static_param=steps))
    run = runs.make_run(flags(folder, "traced"), SHARDED)
    run = dataclasses.replace(run, mm=dataclasses.replace(run.mm, tool=tool))
    runs.train_once(run, Diary(False).callbacks())


def _shown(folder: str) -> list[Any]:
    """Return non-loss data of every evaluation, as seen on this rank."""
    shown: list[Any] = []
    diary = Diary(False)

    def loss_func(output: Any, non_loss_data: bool = False) -> Any:
        return output[1] if non_loss_data else diary.loss_func(output)

    def forward_step(batches: Any, model: Any) -> Any:
        return diary.forward_step(batches, model)[0], loss_func

    def process(collected: list[Any], iteration: int, writer: Any) -> None:
        writer.add_text("targets", str(len(collected)), iteration)
        shown.append((iteration, torch.stack(collected)))

    callbacks = dataclasses.replace(diary.callbacks(), forward_step=forward_step, show=process)
    run = runs.make_run(flags(folder, "shown", tensorboard_dir=f"{folder}/board"), SHARDED)
    runs.train_once(run, callbacks)
    run = runs.make_run(flags(folder, "not shown"), SHARDED)
    runs.train_once(run, callbacks)
    return shown


def _failed_starts(folder: str) -> None:
    """Fail before the first step in two ways; the same process can then train in the folder."""
    run, good = runs.make_run(flags(folder, "again"), SHARDED), Diary(False).callbacks()

    def only_train() -> Any:
        return good.datasets_provider()[0], None, None

    for bad, match in (
        (dataclasses.replace(good, model_provider=lambda: None), "model_provider returned None"),
        (dataclasses.replace(good, datasets_provider=lambda: (None,) * 3), "no train loader"),
        (dataclasses.replace(good, datasets_provider=only_train), "no data to evaluate on"),
    ):
        with pytest.raises(ConfigError, match=match):
            train(run, bad)
    assert train(run, good).iteration == STEPS


def _updates(is_fused: bool) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    """Run steps with a fused or an unfused AdamW; one has a NaN."""
    torch.manual_seed(7)
    model = runs.UserModel()
    shard(model, build(FsdpOptions, SHARDED))
    options = {"lr": runs.RATE, "weight_decay": runs.DECAY, "fused": is_fused}
    optimizer = ShardedAdamW([p for p in model.parameters() if p.requires_grad], **options)
    world, rank = dist.get_world_size(), dist.get_rank()
    dims = ParallelDims(world=world, rank=rank, global_batch_size=2 * world)
    diary = Diary(True, is_uneven=True)
    callbacks = diary.callbacks()
    stepper = FsdpStep(model, optimizer, callbacks, dims, clip=0.2, per_token=True)
    data = runs.UserData()
    batches = [{k: v[None].clone() for k, v in data[n + rank].items()} for n in range(0, 12, 2)]
    batches[3]["images"][:] = float("nan")  # in the second of three steps
    taken = iter(batches)
    queued = []
    for number in range(3):
        queued.append(stepper.train(taken, lambda: False))
        queued[-1].when_read(lambda _, number=number: diary.events.append(f"read {number}"))
    results = [step.wait() for step in queued]
    micro_batch = ["get_batch", "loss_func", "backward"]
    later = [["get_batch", "loss_func", f"read {n}", "backward"] + micro_batch for n in (0, 1)]
    assert diary.events == [*micro_batch * 2, *later[0], *later[1], "read 2"]
    return results, {name: whole(t) for name, t in model.state_dict().items()}


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(observe, 2, str(folder), timeout=240)[0]


@pytest.mark.parametrize("form", ["short", "full"])
def test_callbacks_run_in_the_order_of_the_diagram(seen: Any, form: str) -> None:
    events, _ = seen[1][form]
    micro_batch = ["get_batch", "model", "loss_func", "backward"]
    step = [*micro_batch * 4, "update"]
    evaluation = ["get_batch", "model", "loss_func"] * 4
    start = ["model_provider", "train_valid_test_datasets_provider"]
    assert events == [*start, *step * STEPS, *evaluation]


def test_gradients_are_reduced_once_per_step(seen: Any) -> None:
    assert seen[1]["short"][1] == STEPS * UNITS


def test_both_forms_agree_and_evaluation_uses_the_current_weights(seen: Any) -> None:
    folder, _ = seen
    short, full = (_lines(folder / name) for name in ("short", "full"))
    for name in ("loss", "grad norm", "validation loss"):
        expected = [line[name] for line in short if name in line]
        assert [line[name] for line in full if name in line] == pytest.approx(expected, abs=1e-6)
    model, data = runs.UserModel(), runs.UserData(8)
    model.load_state_dict(runs.outcome_weights(folder / "short"))
    mean = sum(runs.user_loss(model, data[n]).item() for n in range(BATCH)) / BATCH
    assert short[-1]["validation loss"] == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("name", ["uneven", "per token"])
def test_means_over_micro_batches_and_over_tokens(seen: Any, name: str) -> None:
    torch.manual_seed(7)
    model, data = runs.UserModel(), runs.UserData()
    sums, counts = [], []
    for sample in (data[n] for n in range(BATCH)):
        tokens = sample["tokens"][None]
        targets = uneven(tokens[:, 1:])
        logits = model(tokens[:, :-1], sample["images"][None])
        sums.append(cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        counts.append((targets != IGNORED).sum())
    assert len(set(map(int, counts))) > 1
    mean_of_means = torch.stack([s / n for s, n in zip(sums, counts)]).mean()
    loss = sum(sums) / sum(counts) if name == "per token" else mean_of_means
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    first = _lines(seen[0] / name)[0]
    assert first["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert first["grad norm"] == pytest.approx(norm.item(), abs=1e-5)


def test_a_nan_on_one_rank_skips_the_update_on_all(seen: Any) -> None:
    folder, values = seen
    assert values["saved"] == STEPS
    assert not (folder / "once/iter_0000002").exists()
    first, second, third = (
        runs.read_checkpoint(folder / name / f"iter_{n:07d}")
        for name, n in (("once", 1), ("end", 2), ("once", 3))
    )
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    assert not all(torch.equal(third[name], tensor) for name, tensor in first.items())
    kept = sorted(path.name for path in (folder / "stop").glob("iter_*"))
    assert kept == ["iter_0000001"]


def test_every_group_has_the_timeout_of_the_run(seen: Any) -> None:
    assert seen[1]["time-outs"] == {180.0}


def test_a_fused_update_clips_and_skips_by_itself(seen: Any) -> None:
    (plain, expected), (fused, found) = seen[1]["updates"]
    assert [step.is_updated for step in plain] == [True, False, True]
    assert [step.is_updated for step in fused] == [True, False, True]
    assert all(plain[number].grad_norm > 0.2 for number in (0, 2)), "nothing to clip"
    for ours, theirs in zip(fused, plain):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5, nan_ok=True)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5, nan_ok=True)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_configured_rank_writes_a_trace(seen: Any) -> None:
    (trace,) = (seen[0] / "traces").iterdir()
    assert trace.name == "trace_rank1_step2.json" and json.loads(trace.read_text())["traceEvents"]


def test_non_loss_data_is_processed_at_evaluations(seen: Any) -> None:
    ((iteration, targets),) = seen[1]["shown"]
    data = runs.UserData(8)  # the first rank has every other sample
    expected = [data[number]["tokens"][None, 1:] for number in range(0, BATCH, 2)]
    assert iteration == STEPS and torch.equal(targets, torch.stack(expected))


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
