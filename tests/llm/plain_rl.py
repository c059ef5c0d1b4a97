"""PPO and GRPO in plain torch and transformers, one completion at a time, on recorded rollouts.

Written from the papers' formulas, without anything of mindspeed: the reference of the stages.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Recorded(NamedTuple):
    """A completion of a run, and its reward."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    reward: float
    is_ended: bool = True


class Policy:
    """A causal language model, its optimizer, and its log-probabilities."""

    def __init__(self, folder: str, values: dict[str, Any]) -> None:
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=values["lr"], weight_decay=0.0
        )
        self.temperature, self.clip = values.get("temperature", 1.0), values["clip_grad"]

    def distributions(self, one: Recorded) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies of the tokens of a completion."""
        ids = torch.tensor([[*one.prompt, *one.completion]])
        logits = self.model(ids).logits[0, len(one.prompt) - 1 : -1] / self.temperature
        table = logits.log_softmax(-1)
        found = table.gather(-1, torch.tensor(one.completion)[:, None]).squeeze(-1)
        return found, -(table.exp() * table).sum(-1)

    def old(self, batch: Sequence[Recorded]) -> list[torch.Tensor]:
        """Return log-probabilities without gradients."""
        with torch.no_grad():
            return [self.distributions(one)[0] for one in batch]

    def step(self, loss: torch.Tensor) -> float:
        """Update by a loss; return the norm of its gradient."""
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return norm.item()


class Critic(Policy):
    """A sequence-classification model whose values of all tokens count."""

    def __init__(self, folder: str, values: dict[str, Any]) -> None:
        from transformers import LlamaForSequenceClassification

        self.model = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=values["lr"], weight_decay=0.0
        )
        self.clip = values["clip_grad"]

    def values(self, one: Recorded) -> torch.Tensor:
        """Return the value of the state before every token of a completion."""
        ids = torch.tensor([[*one.prompt, *one.completion]])
        hidden = self.model.model(ids).last_hidden_state
        return self.model.score(hidden)[0, len(one.prompt) - 1 : -1, 0]


def surrogate(log_ratio: torch.Tensor, advantage: Any, low: float, high: float) -> Any:
    """Return minus the clipped objective of tokens, or of a completion."""
    ratio = torch.exp(log_ratio)
    return -torch.min(ratio * advantage, torch.clip(ratio, 1 - low, 1 + high) * advantage)


def k3(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the estimate of the divergence of tokens."""
    return torch.exp(reference - new) - (reference - new) - 1


def parts(batch: Sequence[Any], values: dict[str, Any]) -> list[Sequence[Any]]:
    """Return the completions of each update of a pass."""
    size = len(batch) // values.get("num_mini_batches", 1)
    return [batch[start : start + size] for start in range(0, len(batch), size)]


def grpo_steps(
    folder: str, steps: Sequence[Sequence[Recorded]], values: dict[str, Any]
) -> tuple[list[dict[str, float]], Any]:
    """Return the numbers of every step, and the trained model."""
    policy, reference = Policy(folder, values), Policy(values.get("ref_model", folder), values)
    beta, bonus = values.get("grpo_beta", 0.0), values.get("entropy_coeff") or 0.0
    low, size = values.get("clip_ratio", 0.2), values["num_generations"]
    high = values.get("clip_ratio_high") or low
    kind, lines = values.get("grpo_loss_type", "grpo"), []
    for batch in steps:
        advantages, equal = [], []
        for start in range(0, len(batch), size):
            group = torch.tensor([one.reward for one in batch[start : start + size]])
            equal.append(len(set(group.tolist())) == 1)
            spread = 1.0 if values.get("no_scale_rewards") else group.std() + 1e-4
            advantages += ((group - group.mean()) / spread).tolist()
        rows = list(zip(batch, advantages, policy.old(batch), reference.old(batch)))
        updates, divergences = [], []
        for _ in range(values.get("ppo_epochs", 1)):
            for part in parts(rows, values):
                total, kls = torch.zeros(()), []
                skips = values.get("mask_truncated_completions")
                tokens = sum(len(r[0].completion) for r in part if r[0].is_ended or not skips)
                for one, advantage, old, far in part:
                    new, entropies = policy.distributions(one)
                    if one.is_ended or not skips:
                        kls.append(k3(new.detach(), far))
                    by_completion = values.get("importance_sampling_level") == "sequence"
                    log_ratio = (new - old).mean() if by_completion else new - old
                    losses = surrogate(log_ratio, advantage, low, high)
                    losses = losses + beta * k3(new, far) - bonus * entropies
                    losses = losses * float(one.is_ended or not skips)
                    total = (
                        total
                        + {
                            "grpo": losses.mean() / len(part),
                            "dapo": losses.sum() / max(tokens, 1),
                            "dr_grpo": losses.sum() / values["max_new_tokens"] / len(part),
                        }[kind]
                    )
                norm = policy.step(total)
                updates.append((total.item(), norm))
                if kls:
                    divergences.append(torch.cat(kls).mean().item())
        means = [sum(column) / len(updates) for column in zip(*updates)]
        numbers = dict(zip(("policy loss", "grad norm"), means))
        if divergences:
            numbers["kl"] = sum(divergences) / len(divergences)
        lines.append(numbers | {"equal rewards": sum(equal) / len(equal)})
    return lines, policy.model


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Return advantages by their definition: discounted sums of temporal differences."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values)]
    return [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


def ppo_steps(
    folders: tuple[str, str], steps: Sequence[Sequence[Recorded]], values: dict[str, Any]
) -> tuple[list[dict[str, float]], Any, Any]:
    """Return the numbers of every step, and the trained actor and critic."""
    policy, reference = Policy(folders[0], values), Policy(folders[0], values)
    critic, coef = Critic(folders[1], values), values.get("kl_coef", 0.3)
    given = values.get("entropy_coeff")
    bonus = 0.001 if given is None else given
    clip, near = values.get("clip_ratio", 0.2), values.get("cliprange_value", 0.2)
    gamma, lam, lines = values.get("gamma", 1.0), values.get("lam", 0.95), []
    for batch in steps:
        old, far = policy.old(batch), reference.old(batch)
        with torch.no_grad():
            before = [critic.values(one) for one in batch]
        advantages, returns = [], []
        for one, mine, theirs, value in zip(batch, old, far, before):
            rewards = (-coef * (mine - theirs)).tolist()
            rewards[-1] += one.reward
            found = torch.tensor(gae(rewards, value.tolist(), gamma, lam))
            advantages.append(found)
            returns.append(found + value)
        flat = torch.cat(advantages)
        scale = (flat.var() + 1e-8).rsqrt()
        rows = list(
            zip(batch, old, far, [(a - flat.mean()) * scale for a in advantages], before, returns)
        )
        updates = []
        for _ in range(values.get("ppo_epochs", 1)):
            for part in parts(rows, values):
                losses, errors, kls = [], [], []
                for one, mine, theirs, advantage, value, target in part:
                    new, entropies = policy.distributions(one)
                    losses.append(surrogate(new - mine, advantage, clip, clip) - bonus * entropies)
                    kls.append(k3(new.detach(), theirs))
                    now = critic.values(one)
                    clipped = value + torch.clip(now - value, -near, near)
                    errors.append(0.5 * torch.max((now - target) ** 2, (clipped - target) ** 2))
                loss, error = torch.cat(losses).mean(), torch.cat(errors).mean()
                norms = policy.step(loss), critic.step(error)
                updates.append((loss.item(), error.item(), *norms, torch.cat(kls).mean().item()))
        names = ("policy loss", "value loss", "grad norm", "critic grad norm", "kl")
        line = dict(zip(names, (sum(column) / len(updates) for column in zip(*updates))))
        lines.append(line | {"kl coef": coef})
        if target_kl := values.get("kl_target"):
            error = max(-0.2, min(0.2, line["kl"] / target_kl - 1))
            coef *= 1 + error / values.get("kl_horizon", 10.0)
    return lines, policy.model, critic.model
