"""Sentence forms: each is a choice from every slot of a pattern, and some choices are kept for the held-out sets.

The words of a held-out form all occur in training, together they never do.
"""

import random
from dataclasses import dataclass

STARTS = "b br d dr f g gr h j k kr l m n p pr r s st t tr v z"
VOWELS = "aeiou"
HELD_OUT_EVERY = 7  # of forms, and of numbers; about a seventh is never trained on


@dataclass(frozen=True)
class Pattern:
    """A kind of sentence.

    Attributes:
        name: of the kind.
        slots: for each place in the sentence the texts that may stand there; they are joined as they are.
    """

    name: str
    slots: tuple[tuple[str, ...], ...]

    def draw(self, rng: random.Random, held_out: bool) -> tuple[str, str]:
        """A sentence with its placeholders, and the form's id: "gain:0.3.1"."""
        while True:
            choice = [rng.randrange(len(slot)) for slot in self.slots]
            if is_held_out(sum(choice)) == held_out:
                text = "".join(slot[index] for slot, index in zip(self.slots, choice, strict=True))
                return text, f"{self.name}:{'.'.join(map(str, choice))}"


def is_held_out(number: int) -> bool:
    """Whether a number, or the form of that number, is kept for the held-out sets."""
    return number % HELD_OUT_EVERY == 3


def draw_number(rng: random.Random, low: int, high: int, held_out: bool) -> int:
    """A number from `low` to `high` that training sees, or one that it does not.

    Raises:
        ValueError: the range is too short to hold both.
    """
    if high - low + 1 < HELD_OUT_EVERY:
        raise ValueError(f"a range of numbers must hold {HELD_OUT_EVERY} or more, got {low}..{high}")
    while True:
        number = rng.randint(low, high)
        if is_held_out(number) == held_out:
            return number


def split(names: str, held_out: bool) -> list[str]:
    """The part of a list of names (words) that training sees, or the one that it does not."""
    return [name for index, name in enumerate(names.split()) if is_held_out(index) == held_out]


def made_up_name(rng: random.Random, ending: str) -> str:
    """A name of two syllables and an ending; there are 13,225 with each ending."""
    syllables = (rng.choice(STARTS.split()) + rng.choice(VOWELS) for _ in range(2))
    return "".join(syllables).capitalize() + ending
