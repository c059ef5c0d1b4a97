"""What is checked of every client that turns a model of transformers into one of Megatron.

Logits, three training steps and the exported weights, each against transformers.
"""

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.clients import tiny_models
from tests.clients.cases import Case
from tests.ranks import run_ranks

LIMIT = 1e-5
STEPS, RATE, BATCH, SEQUENCE = 3, 0.05, 4, 16
PATIENCE = 300.0


@dataclass(frozen=True)
class Layout:
    """How ranks share a model."""

    name: str
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """The number of ranks; experts are shared by replicas of all else."""
        return self.tp * self.pp * self.ep


DENSE_LAYOUTS = (Layout("1 rank"), Layout("TP 2", tp=2), Layout("PP 2", pp=2))
LAYOUTS = (*DENSE_LAYOUTS, Layout("EP 2", ep=2))


@dataclass(frozen=True)
class Built:
    """This rank's share of a model that a client has built and filled, and how it exports it."""

    chunks: list[Any]
    export: Callable[[], Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class Findings:
    """What one rank saw; what another rank holds is None."""

    logits: torch.Tensor | None
    losses: list[float] | None
    exported: dict[str, torch.Tensor]
    trained: dict[str, torch.Tensor]


def cases(build: str, models: Sequence[str]) -> list[Case]:
    """Return a case for each model in each layout; build is "module:function" (path, layout)."""
    return [
        Case(model, layout.name, partial(check, build, model, layout))
        for model in models
        for layout in (LAYOUTS if model in tiny_models.SPARSE else DENSE_LAYOUTS)
    ]


def check(build: str, model: str, layout: Layout, folder: Path) -> str:
    """Compare a model that a client has built with the one of transformers."""
    path = tiny_models.save(model, folder)
    expected = reference(path)
    findings = run_ranks(run, layout.world, build, path, layout, timeout=PATIENCE)
    logits = next(each.logits for each in findings if each.logits is not None)
    assert expected.logits is not None and expected.losses is not None
    far = (logits - expected.logits).abs().max().item()
    assert far <= LIMIT, f"logits differ from transformers by {far:.1e}, allowed are {LIMIT}"
    losses = next(each.losses for each in findings if each.losses is not None)
    steps = max(abs(a - b) for a, b in zip(losses, expected.losses, strict=True))
    assert steps <= LIMIT, f"losses {losses} are not those of transformers, {expected.losses}"
    assert losses[-1] < losses[0], f"losses do not fall: {losses}"
    _same(findings[0].exported, expected.exported, 0.0, "exported")
    weights = _same(findings[0].trained, expected.trained, LIMIT, "exported after training")
    return f"logits {far:.0e}, losses {steps:.0e}, export bit-equal, trained {weights:.0e}"


def _same(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float, what: str
) -> float:
    names = found.keys() ^ expected.keys()
    assert not names, f"{what}: only one side has {sorted(names)[:4]}"
    furthest = 0.0
    for name, values in expected.items():
        assert found[name].shape == values.shape, f"{what}: {name} is {tuple(found[name].shape)}"
        far = (found[name].float() - values.float()).abs().max().item()
        assert far <= limit, f"{what}: {name} differs by {far:.1e}, allowed are {limit}"
        furthest = max(furthest, far)
    return furthest


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and the labels that follow them."""
    generator = torch.Generator().manual_seed(7)
    shape = (BATCH, SEQUENCE + 1)
    tokens = torch.randint(tiny_models.VOCABULARY, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def reference(path: str) -> Findings:
    """Do the same with transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.train()
    weights = saved(model)
    tokens, labels = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, first = [], None
    for _ in range(STEPS):
        logits = model(tokens).logits
        first = logits.detach() if first is None else first
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Findings(first, losses, weights, saved(model))


def saved(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights as save_pretrained writes them."""
    import tempfile

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder, "model.safetensors"))


def run(build: str, path: str, layout: Layout) -> Findings:
    """Build, evaluate, export and train as one rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.tp,
    )
    model_parallel_cuda_manual_seed(1234)
    built = pkgutil.resolve_name(build)(path, layout)
    exported = _exported(built)
    logits = _logits(built.chunks)
    losses = _train(built.chunks)
    return Findings(logits, losses, exported, _exported(built))


def _exported(built: Built) -> dict[str, torch.Tensor]:
    exported: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, values in built.export():
            # A tied weight may come from the first and from the last stage.
            known = exported.setdefault(name, values.detach().clone())
            assert torch.equal(known, values), f"{name} is exported with two values"
    return exported


def _logits(chunks: list[Any]) -> torch.Tensor | None:
    """Return the logits of the whole batch, all of the vocabulary, where the last stage is."""
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        collected = _schedule(chunks, forward_only=True)
    for chunk in chunks:
        chunk.train()
    from megatron.core import parallel_state

    if not collected or parallel_state.get_tensor_model_parallel_rank():
        return None
    return torch.cat(collected)[..., : tiny_models.VOCABULARY]


def _train(chunks: list[Any]) -> list[float] | None:
    """Train with Megatron's own data parallelism and optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.utils import get_model_config

    config = get_model_config(chunks[0])
    shares = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(config, shares, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    sgd = OptimizerConfig(
        optimizer="sgd", lr=RATE, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0, bf16=False
    )
    optimizer = get_megatron_optimizer(sgd, wrapped)
    losses = []
    for _ in range(STEPS):
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = _schedule(wrapped, forward_only=False)
        optimizer.step()
        if reports:
            loss = torch.stack([report["loss"] for report in reports]).mean()
            torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
            losses.append(loss.item() / parallel_state.get_data_parallel_world_size())
    return losses or None


def _schedule(chunks: list[Any], forward_only: bool) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    replicas = parallel_state.get_data_parallel_world_size()
    step = partial(_forward, with_labels=not forward_only)
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[_micro_batches(forward_only) for _ in chunks],
        model=chunks,
        num_microbatches=BATCH if forward_only else BATCH // replicas,
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _micro_batches(every: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this replica's samples, or every one, one at a time."""
    from megatron.core import parallel_state

    tokens, labels = batch()
    replicas = 1 if every else parallel_state.get_data_parallel_world_size()
    first = 0 if every else parallel_state.get_data_parallel_rank()
    for index in range(first, BATCH, replicas):
        yield tokens[index : index + 1], labels[index : index + 1]


def _forward(data: Iterator[Any], model: Any, with_labels: bool) -> tuple[torch.Tensor, Any]:
    tokens, labels = next(data)
    positions = torch.arange(SEQUENCE)[None]
    output = model(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=None,
        labels=labels if with_labels else None,
    )
    return output, _mean if with_labels else _gathered


def _mean(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place


def _gathered(logits: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    if logits.shape[-1] < tiny_models.VOCABULARY:
        logits = gather_from_tensor_model_parallel_region(logits)
    return logits.detach().float()
