"""A small transformer with a frozen image encoder, trained in one process or sharded."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from mindspeed.config import build
from mindspeed.fsdp import FsdpOptions, shard

# None of them divides by two and four at once: shards are uneven and padded.
VOCABULARY, HIDDEN, HEADS, FFN, LAYERS = 37, 10, 2, 21, 3
BATCH, SEQUENCE, STEPS = 4, 6, 10


class Layer(nn.Module):
    """Attention and MLP; takes its mask by keyword and positions in a tuple, as HF layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, FFN), nn.GELU(), nn.Linear(FFN, HIDDEN))

    def forward(self, x: Any, *, mask: Any, positions: tuple[Any, Any]) -> tuple[Any, None]:
        qkv = self.qkv(self.input_norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = q + positions[0].to(q), k * positions[1].to(k)
        attention = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x)), None


class Transformer(nn.Module):
    """Token and image embeddings, layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.image_encoder = nn.Sequential(nn.Linear(5, HIDDEN), nn.LayerNorm(HIDDEN))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.image_encoder.requires_grad_(False)

    def forward(self, tokens: Any, images: Any) -> Any:
        x = self.embed(tokens) + self.image_encoder(images)
        mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=x.device).tril()
        steps = torch.linspace(0.5, 1.5, SEQUENCE)[:, None]
        for layer in self.layers:
            x, _ = layer(x, mask=mask, positions=(steps, steps))
        return self.head(x)


def new_model() -> Transformer:
    """Build the same model everywhere."""
    torch.manual_seed(7)
    return Transformer()


@dataclass
class Training:
    """Losses of ten steps over all ranks, and this rank's shard of every gradient."""

    losses: list[float]
    gradients: list[dict[str, Any]]


def train(model: nn.Module, rank: int = 0, world: int = 1) -> Training:
    """Take ten AdamW steps on this rank's part of every batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses, gradients = [], []
    part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)[part]
        images = torch.randn(BATCH, SEQUENCE, 5, generator=generator)[part]
        logits = model(tokens[:, :-1], images)
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
        named = model.named_parameters()
        gradients.append({n: local(p.grad).clone() for n, p in named if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return Training(losses, gradients)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_bytes(model: nn.Module) -> int:
    """Count the bytes of memory behind the weights of this rank."""
    return sum(local(p).untyped_storage().nbytes() for p in model.parameters())


@dataclass
class Outcome:
    """The training of one rank, the planned bytes of its weights, and the actual ones."""

    training: Training
    shards: int
    planned: int
    held: int


def train_all(cases: dict[str, dict[str, Any]]) -> dict[str, Outcome]:
    """Shard and train on a rank, once per set of options."""
    return {name: _train_sharded(build(FsdpOptions, values)) for name, values in cases.items()}


def _train_sharded(options: FsdpOptions) -> Outcome:
    model = new_model()
    plan = shard(model, options)
    held = held_bytes(model)
    training = train(model, dist.get_rank(), dist.get_world_size())
    return Outcome(training, plan.shards, plan.bytes_per_rank, held)
