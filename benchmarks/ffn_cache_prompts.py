"""The prompts behind the seed's table of expected hit rates, written for this package."""

from __future__ import annotations

import random
from dataclasses import dataclass

_FACTS = (
    "The capital of France is",
    "The capital of Germany is",
    "The capital of Japan is",
    "The capital of Italy is",
    "Two plus two equals",
    "The largest planet in the solar system is",
    "Water boils at a temperature of",
    "The author of Romeo and Juliet is",
    "The opposite of hot is",
    "The first month of the year is",
    "The chemical symbol of gold is",
    "A week has seven days:",
)
_PARAPHRASES = (
    ("The capital of France is", "France's capital city is"),
    ("The largest planet in the solar system is", "The biggest planet of our solar system is"),
    ("Water boils at a temperature of", "The boiling point of water is"),
    ("The opposite of hot is", "The antonym of the word hot is"),
    ("The author of Romeo and Juliet is", "Romeo and Juliet was written by"),
    ("The first month of the year is", "The month that opens the year is"),
)
_NOVEL = (
    "Ilse Brandt opened volume nine of the tide book of Elmsea and read that",
    "The zorvex, a six-legged kettle of the Plimsoll marshes, is known for",
    "In the year 3140 the senate of Quarnby voted to replace its bridges with",
    "Professor Adaeze Thistlewood's third law of soup states that",
    "The password of the lighthouse at Vintersund was changed to",
    "Unlike the blue grommet, the violet grommet of Harrowgate can",
)


@dataclass(frozen=True)
class Scenario:
    """`warm`: prompts of other clients, before; `asked`: the prompts that are counted."""

    name: str
    seed: str  # what the seed expects of L1 / L2
    warm: tuple[str, ...]
    asked: tuple[str, ...]


def _popular(count: int, seed: int) -> tuple[str, ...]:
    """Common questions as clients ask them: the n-th most popular 1/n as often as the first."""
    weights = [1 / rank for rank in range(1, len(_FACTS) + 1)]
    return tuple(random.Random(seed).choices(_FACTS, weights, k=count))


SCENARIOS = (
    Scenario("repeats", "~100 % / -", _FACTS[:6], _FACTS[:6]),
    Scenario(
        "paraphrases",
        "60-90 % / -",
        tuple(first for first, _ in _PARAPHRASES),
        tuple(second for _, second in _PARAPHRASES),
    ),
    Scenario("common facts", "10-20 % / 60-80 %", _popular(16, 1), _popular(8, 2)),
    Scenario("novel", "5-10 % / 20-30 %", _FACTS, _NOVEL),
)
