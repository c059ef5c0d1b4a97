"""A rollout engine with transformers: a pass over the whole sequence for every token."""

from typing import Any

import torch

from mindspeed_llm.generation.rollout import Completion


class Engine:
    """Samples with a model of transformers that gets the policy's weights before every rollout."""

    def __init__(self, policy: Any) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.policy = policy
        self.model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(policy.config_folder)
        )

    def generate(self, prompts: Any, sampling: Any, numbers: Any) -> list[Completion]:
        """Return a completion of every prompt."""
        self.model.load_state_dict(dict(self.policy.weights()))
        return [self.complete(*one, sampling) for one in zip(prompts, numbers, strict=True)]

    @torch.no_grad()
    def complete(self, prompt: Any, number: int, sampling: Any) -> Completion:
        """Return a completion of one prompt, by its own random numbers."""
        generator = torch.Generator().manual_seed(1000 * sampling.seed + number)
        tokens: list[int] = []
        found: list[float] = []
        while len(tokens) < sampling.limit(prompt) and not sampling.stop_ids & {*tokens[-1:]}:
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].float()
            table = (logits / sampling.temperature).log_softmax(-1)
            token = int(torch.multinomial(table.exp(), 1, generator=generator))
            tokens.append(token)
            found.append(float(table[token]))
        return Completion(tuple(tokens), tuple(found))


class Wrong(Engine):
    """Returns something that cannot be trained on, by the seed of the run."""

    def generate(self, prompts: Any, sampling: Any, numbers: Any) -> Any:
        """Return completions of which the first is wrong."""
        good, rank = Completion((3, 1), (-1.0, -1.0)), torch.distributed.get_rank()
        wrong = {
            1: [],
            2: [Completion((), ())],
            3: [Completion((3, 1), (-1.0,))],
            4: [Completion((99, 1), (-1.0, -1.0))],
            5: [Completion((3, 1), (-1.0, float("nan")))],
            6: [Completion((3 + rank, 1), (-1.0, -1.0))],
            7: [None],
            8: [Completion((3, 1, 3), (-1.0, -1.0, -1.0))],
        }[sampling.seed]
        return [*wrong, *[good] * (len(prompts) - 1)]


make, make_wrong = Engine, Wrong


def fails_on_rank_1(policy: Any) -> None:
    """Raise on one rank; another returns no engine."""
    if torch.distributed.get_rank() == 1:
        raise MemoryError("a second copy does not fit")


def exits_on_rank_1(policy: Any) -> Any:
    """End the process of one rank; another returns an engine."""
    if torch.distributed.get_rank() == 1:
        raise SystemExit(3)
    return Engine(policy)
