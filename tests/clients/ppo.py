"""One PPO update of an actor and of a critic, written with transformers and torch alone."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.clients.bridges import saved

SAMPLES, PROMPT, RESPONSE = 4, 7, 6
RATE, DECAY, EPSILON, CLIP = 1e-3, 0.01, 1e-4, 1.0
"""Adam's epsilon is far above rounding, which a first step would turn into a change of sign."""


@dataclass(frozen=True)
class Batch:
    """Prompts padded on the left, responses padded on the right, and what PPO adds to them."""

    tokens: torch.Tensor
    mask: torch.Tensor
    old: torch.Tensor
    """Log-probabilities, or values, of the model that wrote the responses."""
    aims: torch.Tensor
    """Advantages for an actor, returns for a critic."""

    @property
    def positions(self) -> torch.Tensor:
        """Positions that begin with the first token that is not padding."""
        return (self.mask.cumsum(1) - 1).clamp(min=0)

    @property
    def response_mask(self) -> torch.Tensor:
        """The tokens that count."""
        return self.mask[:, PROMPT:]


@dataclass(frozen=True)
class Update:
    """What a model says of the responses, and what one step makes of it."""

    answers: torch.Tensor
    loss: float
    grad_norm: float
    weights: dict[str, torch.Tensor]


def batch(vocabulary: int, old: torch.Tensor | None = None) -> Batch:
    """Return samples of different lengths; `old` is what the model says of them now."""
    generator = torch.Generator().manual_seed(3)
    shape = (SAMPLES, PROMPT + RESPONSE)
    tokens = torch.randint(3, vocabulary, shape, generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :3], mask[1, -2:], mask[2, :1], mask[2, -3:] = 0, 0, 0, 0
    noise, aims = torch.randn((2, SAMPLES, RESPONSE), generator=generator).unbind()
    # Far enough from now that some tokens are clipped.
    before = torch.zeros_like(noise) if old is None else old + 0.3 * noise
    return Batch(tokens * mask, mask, before, aims)


def actor(path: str, batch: Batch, dtype: torch.dtype = torch.float32) -> Update:
    """Update a language model towards the advantages, with clipped ratios."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    logits = model(batch.tokens, attention_mask=batch.mask, position_ids=batch.positions).logits
    log_probs = logits[:, PROMPT - 1 : -1].float().log_softmax(-1)
    answers = log_probs.gather(-1, batch.tokens[:, PROMPT:, None]).squeeze(-1)
    ratio = (answers - batch.old).exp()
    clipped = torch.maximum(-batch.aims * ratio, -batch.aims * ratio.clamp(0.8, 1.2))
    # Where the advantage is negative the loss is bounded as well.
    losses = torch.where(batch.aims < 0, clipped.clamp(max=-3.0 * batch.aims), clipped)
    return _step(model, answers, _mean(losses, batch))


def critic(path: str, batch: Batch, head: torch.Tensor) -> Update:
    """Update a model with a value head towards the returns, with clipped values."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    hidden = model(
        batch.tokens, attention_mask=batch.mask, position_ids=batch.positions
    ).last_hidden_state
    head = torch.nn.Parameter(head.detach().clone())
    answers = (hidden[:, PROMPT - 1 : -1] @ head.T).squeeze(-1)
    near = answers.clamp(batch.old - 0.5, batch.old + 0.5)
    losses = torch.maximum((answers - batch.aims) ** 2, (near - batch.aims) ** 2) / 2
    update = _step(model, answers, _mean(losses, batch), head)
    body = {f"model.{name}": values for name, values in update.weights.items()}
    return replace(update, weights=body | {"lm_head.weight": head.detach()})


def _mean(losses: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (losses * batch.response_mask).sum() / batch.response_mask.sum()


def _step(model: Any, answers: torch.Tensor, loss: torch.Tensor, *more: torch.Tensor) -> Update:
    """Clip the gradients together and take Megatron's first step of Adam."""
    loss.backward()
    parameters = [*model.parameters(), *more]
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP).item()
    flat = [each for each in parameters if each.dim() == 1]
    groups = [
        {"params": [each for each in parameters if each.dim() != 1], "weight_decay": DECAY},
        {"params": flat, "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=RATE, eps=EPSILON).step()
    return Update(answers.detach(), loss.item(), grad_norm, saved(model))
