"""verl: its training worker as actor and as critic, in ranks of ours and as actors of ray.

Log-probabilities, values and one update of PPO, against transformers and torch.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.clients import ppo, tiny_models
from tests.clients.cases import Case, OwnFailure
from tests.ranks import run_ranks

LIMIT = 1e-5
PATIENCE = 300.0
CRITIC = "value_model"


@dataclass(frozen=True)
class Setup:
    """How one worker is made and asked."""

    layout: str
    role: str = "language_model"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dtype: str = "float32"
    """Only bfloat16 and float16 pass the client's own check of its config."""
    mbridge: bool = True
    """The bridge that the client calls deprecated; megatron-bridge otherwise, see OWN."""
    packed: bool = True
    offload: bool = False
    engine: str = "cuda"
    """Which of its engines the client picks; npu is the one that calls mindspeed by name."""
    launch: str = "ranks"
    """ranks: processes of ours; ray: a worker group; trainer: from the files of its trainer."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp * self.ep


def check(model: str, setup: Setup, folder: Path) -> str:
    """Compare the worker with transformers before and after one update."""
    path = tiny_models.save(model, folder)
    _save_tokenizer(path)
    found, head = LAUNCHES[setup.launch](path, setup)
    batch = ppo.batch(tiny_models.VOCABULARY, found.answers)
    if setup.role == CRITIC:
        expected = ppo.critic(path, batch, head)
    else:
        expected = ppo.actor(path, batch)
    mask = batch.response_mask
    if setup.dtype != "float32":
        return _rounded(path, batch, found, expected)
    answers = ((found.answers - expected.answers) * mask).abs().max().item()
    assert answers <= LIMIT, f"answers differ from transformers by {answers:.1e}"
    loss = abs(found.loss - expected.loss)
    assert loss <= LIMIT, f"the loss is {found.loss}, that of torch {expected.loss}"
    norm = abs(found.grad_norm / expected.grad_norm - 1)
    assert norm <= LIMIT, f"the norm is {found.grad_norm}, that of torch {expected.grad_norm}"
    names = found.weights.keys() ^ expected.weights.keys()
    assert not names, f"only one side has {sorted(names)[:4]}"
    apart = [(found.weights[key] - each).abs().max() for key, each in expected.weights.items()]
    weights = torch.stack(apart).max().item()
    assert weights <= LIMIT, f"weights after the update differ by {weights:.1e}"
    said = "values" if setup.role == CRITIC else "log-probs"
    return f"{said} {answers:.0e}, loss {loss:.0e}, norm {norm:.0e}, weights {weights:.0e}"


def _rounded(path: str, batch: ppo.Batch, found: ppo.Update, exact: ppo.Update) -> str:
    """Ask of bf16 that it is about as far from float32 as transformers in bf16 is."""
    other = ppo.actor(path, batch, torch.bfloat16)

    def far(update: ppo.Update) -> float:
        return ((update.answers - exact.answers) * batch.response_mask).abs().mean().item()

    assert far(found) <= 3 * far(other), f"{far(found):.1e}, transformers {far(other):.1e}"
    assert abs(found.loss - exact.loss) <= 0.02, f"loss {found.loss}, in float32 {exact.loss}"
    return f"log-probs {far(found):.0e} from float32, transformers in bf16 {far(other):.0e}"


def _save_tokenizer(path: str) -> None:
    """Write one word a token: the worker wants a tokenizer, if only for its padding."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{index}": index for index in range(tiny_models.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t1"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="t0", eos_token="t2", unk_token="t1"
    ).save_pretrained(path)


def _in_ranks(path: str, setup: Setup) -> tuple[ppo.Update, torch.Tensor]:
    found = run_ranks(_rank, setup.world, path, setup, timeout=PATIENCE)
    return next(each for each in found if each is not None)


def _rank(path: str, setup: Setup) -> tuple[ppo.Update, torch.Tensor] | None:
    os.environ["VERL_ENGINE_DEVICE"] = setup.engine
    if setup.engine == "npu":
        from verl.workers.engine.mindspeed import transformer_impl

        assert transformer_impl.repatch is not None, "the client does not find repatch"
    worker = _worker_class()(_config(path, setup))
    return _drive(worker, setup, lambda output: output)


def _in_ray(path: str, setup: Setup) -> tuple[ppo.Update, torch.Tensor]:
    with _group(_worker_class(), setup, config=_config(path, setup)) as group:
        found = _drive(group, setup, lambda output: output.get())
    assert found is not None
    return found


def _by_command_line(path: str, setup: Setup) -> tuple[ppo.Update, None]:
    """Have the client read its own YAML files and start the worker that its trainer starts."""
    import hydra
    import verl
    from verl.workers.engine_workers import ActorRolloutRefWorker

    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    overrides = [
        f"actor_rollout_ref.model.path={path}",
        "actor_rollout_ref.rollout.name=vllm",  # none is started for an actor alone
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={ppo.SAMPLES}",
        f"actor_rollout_ref.actor.optim.lr={ppo.RATE}",
        "actor_rollout_ref.actor.optim.lr_decay_steps=10",
        f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={setup.tp}",
        "actor_rollout_ref.actor.megatron.vanilla_mbridge=True",
    ]
    with hydra.initialize_config_dir(folder, version_base=None):
        config = hydra.compose("ppo_megatron_trainer", overrides).actor_rollout_ref
    with _group(ActorRolloutRefWorker, setup, config=config, role="actor") as group:
        group.init_model()
        data = _data(ppo.batch(tiny_models.VOCABULARY), setup)
        answers = _of_responses(group.compute_log_prob(data), setup)
        data = _data(ppo.batch(tiny_models.VOCABULARY, answers), setup)
        metrics = group.update_actor(data)["metrics"]
    return ppo.Update(answers, metrics["loss"][0], metrics["grad_norm"][0], {}), None


@contextlib.contextmanager
def _group(kind: type, setup: Setup, **arguments: Any) -> Iterator[Any]:
    """Start workers as the client's trainers do, on a ray of this machine."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    ray.init(num_cpus=setup.world + 1, include_dashboard=False, log_to_driver=False)
    try:
        pool = RayResourcePool([setup.world], use_gpu=False, max_colocate_count=1)
        made = RayClassWithInitArgs(ray.remote(kind), **arguments)
        yield RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made)
    finally:
        ray.shutdown()


def _drive(
    worker: Any, setup: Setup, wait: Callable[[Any], Any]
) -> tuple[ppo.Update, torch.Tensor] | None:
    """Initialise a worker, ask it about the batch and update it once."""
    worker.reset()
    worker.set_loss_fn(_loss(setup))
    head = _first(worker.weights()).get("lm_head.weight")
    said = wait(worker.infer_batch(_data(ppo.batch(tiny_models.VOCABULARY), setup)))
    shared = [None if said is None else _of_responses(said, setup)]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(shared, src=setup.world - 1 if setup.pp > 1 else 0)
    data = _data(ppo.batch(tiny_models.VOCABULARY, shared[0]), setup)
    done = wait(worker.train_mini_batch(data))
    weights = _first(worker.weights())
    if done is None:
        return None
    [loss], [norm] = (done["metrics"][name] for name in ("loss", "grad_norm"))
    return ppo.Update(shared[0], loss, norm, weights), head


def _of_responses(said: Any, setup: Setup) -> torch.Tensor:
    from verl.workers.utils.padding import no_padding_2_padding

    asked = _data(ppo.batch(tiny_models.VOCABULARY), setup)
    name = "values" if setup.role == CRITIC else "log_probs"
    return no_padding_2_padding(said[name], asked).float().squeeze(-1)


def _first(weights: Any) -> dict[str, torch.Tensor]:
    return weights[0] if isinstance(weights, list) else weights


def _worker_class() -> type:
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.workers.engine_workers import TrainingWorker

    class Worker(TrainingWorker):
        """The worker of the client, which also returns what it would send to a rollout engine."""

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def weights(self) -> dict[str, torch.Tensor]:
            """Return the weights under the names of transformers."""
            pairs = self.engine.get_per_tensor_param()[0]
            return {name: each.detach().float().clone() for name, each in pairs}

    return Worker


def _config(path: str, setup: Setup) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        HFModelConfig,
        McoreEngineConfig,
        McoreOptimizerConfig,
        TrainingWorkerConfig,
    )

    engine = McoreEngineConfig(
        tensor_model_parallel_size=setup.tp,
        pipeline_model_parallel_size=setup.pp,
        expert_model_parallel_size=setup.ep,
        vanilla_mbridge=setup.mbridge,
        param_offload=setup.offload,
        optimizer_offload=setup.offload,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2,
    )
    object.__setattr__(engine, "dtype", setup.dtype)
    return TrainingWorkerConfig(
        model_type=setup.role,
        model_config=HFModelConfig(path=path, use_remove_padding=setup.packed),
        engine_config=engine,
        optimizer_config=McoreOptimizerConfig(
            lr=ppo.RATE,
            lr_decay_steps=10,
            weight_decay=ppo.DECAY,
            clip_grad=ppo.CLIP,
            override_optimizer_config={"adam_eps": ppo.EPSILON},
        ),
        checkpoint_config=CheckpointConfig(),
    )


def _loss(setup: Setup) -> Callable[..., Any]:
    from verl.workers.config import McoreActorConfig, McoreCriticConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    if setup.role == CRITIC:
        return partial(value_loss, config=McoreCriticConfig(ppo_micro_batch_size_per_gpu=2))
    return partial(ppo_loss, config=McoreActorConfig(ppo_micro_batch_size_per_gpu=2, rollout_n=1))


def _data(batch: ppo.Batch, setup: Setup) -> Any:
    """Return the batch as the client's trainer hands it to a worker."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import left_right_2_no_padding

    tensors = {
        "input_ids": batch.tokens,
        "prompts": batch.tokens[:, : ppo.PROMPT],
        "responses": batch.tokens[:, ppo.PROMPT :],
        "attention_mask": batch.mask,
        "response_mask": batch.response_mask,
        "position_ids": batch.positions,
    }
    names = ("values", "returns") if setup.role == CRITIC else ("old_log_probs", "advantages")
    tensors |= dict(zip(names, (batch.old, batch.aims), strict=True))
    data = left_right_2_no_padding(TensorDict(tensors, batch_size=ppo.SAMPLES))
    tensordict_utils.assign_non_tensor(
        data,
        global_token_num=batch.mask.sum(1).tolist(),
        temperature=1.0,
        compute_loss=False,
        global_batch_size=ppo.SAMPLES,
        mini_batch_size=ppo.SAMPLES,
        dataloader_kwargs={"shuffle": False},
    )
    return data


LAUNCHES = {"ranks": _in_ranks, "ray": _in_ray, "trainer": _by_command_line}
ONE_RANK = Setup("1 rank")
CASES = [
    Case(f"{role} {model}", setup.layout, partial(check, model, setup))
    for role, models, setups in [
        (
            "actor",
            ("qwen2", "qwen2-tied", "qwen3"),
            (ONE_RANK, Setup("TP 2", tp=2), Setup("PP 2", pp=2)),
        ),
        (
            "actor",
            ("qwen3",),
            (
                Setup("megatron-bridge", mbridge=False),
                Setup("padded", packed=False),
                Setup("offload", offload=True),
                Setup("bf16", dtype="bfloat16"),
                Setup("npu engine", engine="npu"),
                Setup("ray", launch="ray"),
                Setup("ray TP 2", tp=2, launch="ray"),
                Setup("trainer TP 2", tp=2, dtype="bfloat16", launch="trainer"),
            ),
        ),
        (
            "critic",
            ("qwen3",),
            (
                Setup("1 rank", CRITIC),
                Setup("TP 2", CRITIC, tp=2),
                Setup("PP 2", CRITIC, pp=2),
                Setup("ray", CRITIC, launch="ray"),
            ),
        ),
        ("actor", ("qwen3_moe",), (ONE_RANK, Setup("ray EP 2", ep=2, launch="ray"))),
    ]
    for model in models
    for setup in setups
]
OWN = [
    OwnFailure(
        "*",
        "megatron-bridge",
        "answers differ from transformers",
        "megatron-bridge 0.3.1 looks for rope_theta beside the other fields of a config "
        "(models/conversion/model_bridge.py:264), transformers 5 keeps it in rope_parameters: "
        "it takes its default instead. verl pins a newer one, which wants Python 3.12",
    )
]
