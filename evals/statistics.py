"""Scores with their standard error, and two runs compared question by question."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Z95 = 1.959963984540054  # of the normal distribution, two-sided


def score(right: Sequence[bool]) -> dict[str, Any]:
    """The share of right answers over the questions, its standard error and their number.

    The error is the sample's, sqrt(p (1 - p) / (n - 1)); None for a single question.
    """
    n = len(right)
    share = sum(right) / n
    return {"score": share, "stderr": math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None, "n": n}


@dataclass(frozen=True)
class Paired:
    """Two runs over the same questions.

    Attributes:
        both, only_a, only_b, neither: questions that these answered right.
    """

    both: int
    only_a: int
    only_b: int
    neither: int

    @classmethod
    def of(cls, a: Sequence[bool], b: Sequence[bool]) -> "Paired":
        """Count; a[i] and b[i] are the same question."""
        pairs = list(zip(a, b, strict=True))
        return cls(*(pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))))

    @property
    def n(self) -> int:
        """Questions."""
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def difference(self) -> float:
        """The score of B minus that of A."""
        return (self.only_b - self.only_a) / self.n

    def mcnemar(self) -> float:
        """The exact two-sided p of McNemar's test: how likely so uneven a split is where both are equally good."""
        discordant = self.only_a + self.only_b
        ways = tail = 1  # ways to split with k on the smaller side, and their sum up to here; math.comb is slow
        for k in range(1, min(self.only_a, self.only_b) + 1):
            ways = ways * (discordant - k + 1) // k
            tail += ways
        return min(1.0, 2 * tail / 2**discordant)

    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference, after Bonett and Price (2012): two imagined questions, one for each run,
        keep it from being empty where the runs never differ."""
        n, a, b = self.n + 2, self.only_a + 1, self.only_b + 1
        middle = (b - a) / n
        half = Z95 * math.sqrt(((a + b) / n - middle**2) / n)
        return max(-1.0, middle - half), min(1.0, middle + half)
