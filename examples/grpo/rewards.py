"""The reward of the example: the right number, in few words."""

import re

ENOUGH = 5
"""Words of "3 + 4 = 7"."""


def brief_and_right(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """Return 1 for a completion of few words with the answer in it, less for more words."""
    rewards = []
    for text, right in zip(completions, answer):
        numbers, words = re.findall(r"\d+", text), text.split()
        rewards.append(min(1.0, ENOUGH / len(words)) if right in numbers else 0.0)
    return rewards
