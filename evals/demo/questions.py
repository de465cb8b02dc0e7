"""Four-choice questions in MMLU's format: facts of a small world, and computations without scratch space.

Held-out questions have sentence forms that training never has; those that compute also have numbers of their own.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moe_int8.evals.demo.forms import Pattern, is_held_out
from moe_int8.evals.demo.world import RELATIONS, Relation, World

LETTERS = "ABCD"
ELEMENTARY, MATHEMATICS = "elementary_mathematics", "high_school_mathematics"
COMPUTER_SCIENCE = "high_school_computer_science"
SUBJECTS = (*dict.fromkeys(relation.subject for relation in RELATIONS), ELEMENTARY, MATHEMATICS, COMPUTER_SCIENCE)

ASK = ("What is", "Which of these is", "Which of the following is", "Which answer names", "Which option names")
THING = {
    "country": (" {thing}?", " the country {thing}?", " the country called {thing}?", " the state of {thing}?"),
    "person": (" {thing}?", " a person called {thing}?", " the person {thing}?", " a certain {thing}?"),
}
BY_CAPITAL = (
    " the country whose capital is {thing}?",
    " the country with the capital {thing}?",
    " the country that is ruled from {thing}?",
    " the country around the capital {thing}?",
)
BY_PERSON = (" the home country of {thing}?", " the country where {thing} lives?", " the country that {thing} is from?")
COMPUTE = ("What is ", "Which number is ", "Find ", "Compute ", "Work out ", "Give ")
REMAINDER = Pattern("remainder", (ASK, (" the remainder ",), ("of {a} divided by {b}?", "when {a} is divided by {b}?")))
SEQUENCE = Pattern("sequence", (ASK, (" the next number ",), ("after {shown}?", "in the sequence {shown}?")))
NEAR = tuple(sign * step for step in (1, 2, 3, 5, 10, 20, 100) for sign in (1, -1))
WORDS = ("", "the result of ", "the value of ")


@dataclass(frozen=True)
class Question:
    """A question with its four choices, as in MMLU's files.

    Attributes:
        answer: index of the right choice.
        form: id of the sentence form.
        numbers: that held-out questions do not share with training.
    """

    subject: str
    question: str
    choices: tuple[str, str, str, str]
    answer: int
    form: str
    numbers: tuple[int, ...] = ()


class Questions:
    """Draws questions.

    Args:
        world: what there is to know.
        operand: largest number in a sum; products and powers of two go with it.
        held_out: draw for the held-out set, not for training.
    """

    def __init__(self, world: World, operand: int, held_out: bool) -> None:
        if operand < 20:
            raise ValueError(f"operand must be 20 or more, got {operand}")
        self.world = world
        self.operand = operand
        self.held_out = held_out
        self._facts = {name: list(values.items()) for name, values in world.facts.items()}
        self._people: dict[str, list[str]] = {country: [] for country in world.facts["capital"]}
        for person, home in world.facts["home"].items():
            self._people[home].append(person)
        self._patterns = {
            (relation.name, hop): Pattern(
                f"{relation.name}_{hop}", (ASK, tuple(" " + p for p in relation.phrases), things)
            )
            for relation in RELATIONS
            for hop, things in (("direct", THING[relation.thing]), ("capital", BY_CAPITAL), ("person", BY_PERSON))
        }

    def draw(self, rng: random.Random, subject: str) -> Question:
        """A question of this subject."""
        computing: dict[str, Callable[[random.Random], Question]] = {
            ELEMENTARY: self._elementary,
            MATHEMATICS: self._mathematics,
            COMPUTER_SCIENCE: self._computer_science,
        }
        return computing[subject](rng) if subject in computing else self._fact(rng, subject)

    def statement(self, rng: random.Random) -> str:
        """A fact or a computation as a sentence, for training."""
        if rng.random() < 0.3:
            a, b = self._numbers(rng, max(self.operand // 10, 10), 9)
            return f"{a} * {b} = {a * b}."
        relation = rng.choice(RELATIONS)
        thing, value = rng.choice(self._facts[relation.name])
        return f"{rng.choice(relation.phrases).capitalize()} {thing} is {value}."

    def _fact(self, rng: random.Random, subject: str) -> Question:
        relation = rng.choice([relation for relation in RELATIONS if relation.subject == subject])
        facts = self._facts[relation.name]
        thing, value = rng.choice(facts)
        hop, shown = self._shown(rng, relation, thing)
        text, form = self._patterns[relation.name, hop].draw(rng, self.held_out)
        others = {value}
        while len(others) < 4:
            others.add(rng.choice(facts)[1])
        return self._question(rng, subject, text.format(thing=shown), value, others - {value}, form)

    def _shown(self, rng: random.Random, relation: Relation, thing: str) -> tuple[str, str]:
        """How the question speaks of a country: by its name, by its capital, or by someone who lives there."""
        if relation.thing != "country" or rng.random() < 0.5:
            return "direct", thing
        if relation.name != "capital" and rng.random() < 0.5:
            return "capital", self.world.facts["capital"][thing]
        people = self._people[thing]
        return ("person", rng.choice(people)) if people else ("direct", thing)

    def _elementary(self, rng: random.Random) -> Question:
        kind = rng.choice("+-*")
        most = max(self.operand // 10, 10) if kind == "*" else self.operand
        a, b = self._numbers(rng, most, 9 if kind == "*" else most)
        a, b = (max(a, b), min(a, b)) if kind == "-" else (a, b)
        value = {"+": a + b, "-": a - b, "*": a * b}[kind]
        return self._compute(rng, ELEMENTARY, f"{a} {kind} {b}", value, (a, b))

    def _mathematics(self, rng: random.Random) -> Question:
        kind = rng.choice(["remainder", "sequence", "two"])
        if kind == "remainder":
            a, b = self._numbers(rng, self.operand, 9, least=4)
            text, form = REMAINDER.draw(rng, self.held_out)
            rest = [str(r) for r in range(b) if r != a % b]
            return self._question(
                rng, MATHEMATICS, text.format(a=a, b=b), str(a % b), rng.sample(rest, 3), form, (a, b)
            )
        if kind == "sequence":
            a, b = self._numbers(rng, self.operand, max(self.operand // 10, 10))
            text, form = SEQUENCE.draw(rng, self.held_out)
            shown = f"{a}, {a + b}, {a + 2 * b}"
            value = a + 3 * b
            return self._question(
                rng, MATHEMATICS, text.format(shown=shown), str(value), self._near(rng, value), form, (a, b)
            )
        a, b = self._numbers(rng, max(self.operand // 10, 10), 9)
        c = rng.randint(2, max(self.operand // 10, 10))
        return self._compute(rng, MATHEMATICS, f"{a} * {b} + {c}", a * b + c, (a, b))

    def _computer_science(self, rng: random.Random) -> Question:
        n, _ = self._numbers(rng, 255, 2)
        others = [n ^ (1 << bit) for bit in rng.sample(range(n.bit_length()), 3)] if n > 3 else [n + 1, n + 2, n + 3]
        to_binary = rng.random() < 0.5
        slots = (
            ("{a} in binary?", "{a} as a binary number?") if to_binary else ("binary {a}?", "the binary number {a}?")
        )
        text, form = Pattern(f"binary_{to_binary}", (ASK, (" ", " the value of "), slots)).draw(rng, self.held_out)
        shown, value = (str(n), f"{n:b}") if to_binary else (f"{n:b}", str(n))
        choices = [f"{other:b}" if to_binary else str(other) for other in others]
        return self._question(rng, COMPUTER_SCIENCE, text.format(a=shown), value, choices, form, (n,))

    def _numbers(self, rng: random.Random, most_a: int, most_b: int, least: int = 2) -> tuple[int, int]:
        """Two numbers that training sees together, or that it does not."""
        while True:
            a, b = rng.randint(least, most_a), rng.randint(least, most_b)
            if is_held_out(a + b) == self.held_out:
                return a, b

    def _compute(self, rng: random.Random, subject: str, term: str, value: int, numbers: tuple[int, ...]) -> Question:
        text, form = Pattern("compute", (COMPUTE, WORDS)).draw(rng, self.held_out)
        mark = "?" if text.startswith("Wh") else "."
        return self._question(rng, subject, f"{text}{term}{mark}", str(value), self._near(rng, value), form, numbers)

    def _near(self, rng: random.Random, value: int) -> list[str]:
        """Three wrong answers that a rough estimate does not rule out."""
        return [str(value + step) for step in rng.sample([s for s in NEAR if value + s >= 0], 3)]

    def _question(
        self,
        rng: random.Random,
        subject: str,
        text: str,
        value: str,
        others: Iterable[str],
        form: str,
        numbers: tuple[int, ...] = (),
    ) -> Question:
        choices = [value, *sorted(others)]
        rng.shuffle(choices)
        a, b, c, d = choices
        return Question(subject, text, (a, b, c, d), choices.index(value), form, numbers)
