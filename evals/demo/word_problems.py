"""Arithmetic word problems in GSM8K's format: a story about one amount that changes step by step.

An answer has a line for each calculation, with the calculator's annotation (`<<48+35=83>>`), and ends in `#### N`.
Held-out problems have names, amounts and sentence forms that training problems never have.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from moe_int8.evals.demo.forms import Pattern, draw_number, made_up_name, split
from moe_int8.evals.demo.story_forms import (
    DAYS,
    FRACTIONS,
    FRIEND,
    GAIN,
    GAIN_PACKS,
    GAIN_PERCENT,
    HE,
    HOW_MANY,
    LOSE,
    LOSE_PACKS,
    LOSE_PART,
    PERCENT,
    PRICE,
    SHARE,
    SHE,
    START,
    THINGS,
    TIMES,
)

LARGEST_TOTAL = 9999
MADE_UP = 0.3  # of the names in training, so that names are copied from the question and not learned by heart


@dataclass(frozen=True)
class Difficulty:
    """How hard the problems are.

    Attributes:
        steps: fewest and most calculations.
        amount: largest number that is added or taken away, and with which a story starts.
        factor: largest number that is multiplied or divided by.
    """

    steps: tuple[int, int] = (3, 8)
    amount: int = 999
    factor: int = 12

    def __post_init__(self) -> None:
        low, high = self.steps
        if not 2 <= low <= high:
            raise ValueError(f"steps must be two numbers from 2 up, the smaller one first, got {low} and {high}")
        for name, least in (("amount", 50), ("factor", 4)):
            if not least <= getattr(self, name) <= LARGEST_TOTAL:
                raise ValueError(f"{name} must be from {least} to {LARGEST_TOTAL}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Problem:
    """A question with its answer, as in GSM8K's files.

    Attributes:
        steps: how many calculations the answer takes.
        forms: ids of the sentence forms that the question is made of.
        amounts: the numbers in it that held-out problems do not share with training.
    """

    question: str
    answer: str
    steps: int
    forms: tuple[str, ...]
    amounts: tuple[int, ...]


@dataclass
class _Story:
    """A problem in the making: the amount `total` after the sentences so far."""

    rng: random.Random
    difficulty: Difficulty
    held_out: bool
    name: str = ""
    total: int = 0
    words: dict[str, str] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)
    amounts: list[int] = field(default_factory=list)

    def say(self, pattern: Pattern, **values: object) -> None:
        text, form = pattern.draw(self.rng, self.held_out)
        self.sentences.append(text.format(**self.words, **values))
        self.forms.append(form)

    def calculate(self, before: str, term: str, result: int, after: str) -> int:
        """Add an answer's line, "before <<term=result>>result after."; returns the result."""
        self.lines.append(f"{before}<<{term}={result}>>{result}{after}.")
        return result

    def amount(self, high: int) -> int:
        number = draw_number(self.rng, 2, high, self.held_out)
        self.amounts.append(number)
        return number

    def factor(self) -> int:
        return self.rng.randint(2, self.difficulty.factor)

    @property
    def has(self) -> str:
        return f"{self.name} has "

    @property
    def things(self) -> str:
        return " " + self.words["things"]


def _gain(story: _Story) -> None:
    n = story.amount(story.difficulty.amount)
    story.say(GAIN, n=n)
    story.total = story.calculate(story.has, f"{story.total}+{n}", story.total + n, story.things)


def _lose(story: _Story) -> None:
    if story.total < 20:
        return
    n = story.amount(min(story.difficulty.amount, story.total - 1))
    story.say(LOSE, n=n)
    story.total = story.calculate(story.has, f"{story.total}-{n}", story.total - n, story.things + " left")


def _gain_packs(story: _Story) -> None:
    k, n = story.factor(), story.amount(max(story.difficulty.amount // 10, 9))
    story.say(GAIN_PACKS, k=k, n=n)
    new = story.calculate("That is ", f"{k}*{n}", k * n, f"{story.things} more")
    story.total = story.calculate(story.has, f"{story.total}+{new}", story.total + new, story.things)


def _lose_packs(story: _Story) -> None:
    k = story.factor()
    most = min(max(story.difficulty.amount // 10, 9), (story.total - 1) // k)
    if most < 9:
        return
    n = story.amount(most)
    story.say(LOSE_PACKS, k=k, n=n)
    gone = story.calculate("That takes ", f"{k}*{n}", k * n, story.things)
    story.total = story.calculate(story.has, f"{story.total}-{gone}", story.total - gone, story.things + " left")


def _times(story: _Story) -> None:
    k = story.factor()
    if story.total * k > LARGEST_TOTAL:
        return
    story.say(TIMES, k=k)
    story.total = story.calculate(story.has, f"{story.total}*{k}", story.total * k, story.things)


def _share(story: _Story) -> None:
    k = story.factor()
    if story.total % k or story.total // k < 5:
        return
    story.say(SHARE, k=k)
    story.total = story.calculate("Each pile has ", f"{story.total}/{k}", story.total // k, story.things)


def _lose_part(story: _Story) -> None:
    k = story.rng.choice(list(FRACTIONS))
    if story.total % k or story.total // k < 2:
        return
    story.say(LOSE_PART, part=FRACTIONS[k])
    gone = story.calculate("That takes ", f"{story.total}/{k}", story.total // k, story.things)
    story.total = story.calculate(story.has, f"{story.total}-{gone}", story.total - gone, story.things + " left")


def _gain_percent(story: _Story) -> None:
    k = story.rng.choice(PERCENT)
    if story.total * k % 100:
        return
    story.say(GAIN_PERCENT, k=k)
    new = story.calculate("That is ", f"{story.total}*{k}/100", story.total * k // 100, f"{story.things} more")
    story.total = story.calculate(story.has, f"{story.total}+{new}", story.total + new, story.things)


def _friend(story: _Story) -> None:
    n = story.amount(story.difficulty.amount)
    while (friend := _name(story.rng, story.held_out)) == story.name:
        pass
    story.say(FRIEND, n=n, friend=friend)
    theirs = story.calculate(f"{friend} has ", f"{story.total}+{n}", story.total + n, story.things)
    story.total = story.calculate("Together it is ", f"{story.total}+{theirs}", story.total + theirs, story.things)


def _price(story: _Story) -> None:
    k = story.factor()
    if story.total * k > LARGEST_TOTAL:
        return
    story.say(PRICE, k=k)
    story.total = story.calculate("The money is ", f"{story.total}*{k}", story.total * k, " dollars")


def _days(story: _Story) -> None:
    k = story.factor()
    if story.total % k:
        return
    story.say(DAYS, k=k)
    story.total = story.calculate("They last ", f"{story.total}/{k}", story.total // k, " days")


# Each adds a sentence and its calculations to a story, if the numbers allow it.
Step = Callable[[_Story], None]
ONE: tuple[Step, ...] = (_gain, _lose, _times, _share)
TWO: tuple[Step, ...] = (_gain_packs, _lose_packs, _lose_part, _gain_percent, _friend)
LAST: tuple[Step, ...] = (_price, _days)


def word_problem(rng: random.Random, difficulty: Difficulty, held_out: bool) -> Problem:
    """Draw a problem, for training or for the held-out set."""
    while True:
        story = _draw(rng, difficulty, held_out)
        if story is not None:
            return Problem(
                " ".join(story.sentences),
                "\n".join([*story.lines, f"#### {story.total}"]),
                len(story.lines),
                tuple(story.forms),
                tuple(story.amounts),
            )


def _draw(rng: random.Random, difficulty: Difficulty, held_out: bool) -> _Story | None:
    """A story of the wanted length, or None if its numbers grew too large or do not allow its question."""
    steps = rng.randint(*difficulty.steps)
    story = _Story(rng, difficulty, held_out)
    story.name = _name(rng, held_out)
    pronoun = "she" if story.name in SHE.split() else "he"
    story.words = {"name": story.name, "s": pronoun, "S": pronoun.capitalize(), "things": rng.choice(THINGS.split())}
    story.total = story.amount(difficulty.amount)
    story.say(START, n=story.total)
    asks_amount = rng.random() < 0.5
    before_question = steps if asks_amount else steps - 1
    while (room := before_question - len(story.lines)) > 0:
        rng.choice(ONE if room == 1 or rng.random() < 0.5 else TWO)(story)
        if story.total > LARGEST_TOTAL:
            return None
    if asks_amount:
        story.say(HOW_MANY)
    else:
        rng.choice(LAST)(story)
    if len(story.lines) < steps:
        return None
    story.sentences[-1] += "?"
    return story


def _name(rng: random.Random, held_out: bool) -> str:
    if not held_out and rng.random() < MADE_UP:
        return made_up_name(rng, "n")
    return rng.choice(split(f"{SHE} {HE}", held_out))
