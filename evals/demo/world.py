"""A small invented world: countries and people, and what is true of them.

It is always the same, whatever the seed of the questions about it: what a model is asked it can have learned.
"""

import random
from dataclasses import dataclass

from moe_int8.evals.demo.forms import made_up_name

SEED = 7
MOST_COUNTRIES = 5000  # with twice as many people most made-up names are used
FIRST_NAMES = "Anna Bruno Celia Dario Elin Fabio Gerda Henry Irene Jonas Karla Lorenz Marta Nils Otto Petra"


@dataclass(frozen=True)
class Relation:
    """A kind of fact about a kind of thing: "the capital of" a country.

    Attributes:
        thing: "country" or "person".
        subject: of MMLU, under which its questions are filed.
        phrases: what it is called, up to the thing's name.
        values: the words that it takes, with blanks between; empty if every thing has its own.
        ending: of the names that are made up for it, if every thing has its own.
    """

    name: str
    thing: str
    subject: str
    phrases: tuple[str, ...]
    values: str = ""
    ending: str = ""


GEOGRAPHY, ECONOMICS, HISTORY = "high_school_geography", "high_school_macroeconomics", "high_school_world_history"
PEOPLE = "miscellaneous"
RELATIONS = (
    Relation(
        "capital", "country", GEOGRAPHY, ("the capital of", "the capital city of", "the main city of"), ending="burg",
    ),
    Relation(
        "river", "country", GEOGRAPHY, ("the longest river of", "the main river of", "the largest river of"),
        ending="ra",
    ),
    Relation("currency", "country", ECONOMICS, ("the currency of", "the money of", "the coin of"), ending="k"),
    Relation(
        "export", "country", ECONOMICS, ("the main export of", "the chief export of", "the largest export of"),
        "wheat copper tea wool salt timber silk cotton silver coffee glass honey olives paper rice oil",
    ),
    Relation("founder", "country", HISTORY, ("the founder of", "the first ruler of", "the first king of"), ending="us"),
    Relation(
        "year", "country", HISTORY, ("the founding year of", "the first year of", "the year of the founding of"),
        " ".join(map(str, range(1100, 1990))),
    ),
    Relation("home", "person", PEOPLE, ("the home country of", "the native country of", "the home of")),
    Relation(
        "job", "person", PEOPLE, ("the job of", "the profession of", "the trade of"),
        "baker teacher farmer doctor painter sailor tailor lawyer miner pilot singer smith cook judge",
    ),
    Relation(
        "pet", "person", PEOPLE, ("the pet of", "the animal of", "the favorite animal of"),
        "dog cat parrot horse rabbit goat turtle pony duck hamster canary snake lizard donkey",
    ),
)  # fmt: skip


class World:
    """All facts.

    Args:
        countries: how many, 10 to MOST_COUNTRIES; there are twice as many people.

    Attributes:
        facts: for each relation's name the value of every thing, by the thing's name.
    """

    def __init__(self, countries: int) -> None:
        if not 10 <= countries <= MOST_COUNTRIES:
            raise ValueError(f"countries must be from 10 to {MOST_COUNTRIES}, got {countries}")
        self._rng = random.Random(SEED)
        self._used: set[str] = set()
        names = {"country": [self._name("ia") for _ in range(countries)], "person": self._people(2 * countries)}
        self.facts: dict[str, dict[str, str]] = {}
        for relation in RELATIONS:
            things = names[relation.thing]
            values = names["country"] if relation.name == "home" else relation.values.split()
            self.facts[relation.name] = {
                thing: self._rng.choice(values) if values else self._name(relation.ending) for thing in things
            }

    def _people(self, count: int) -> list[str]:
        return [f"{self._rng.choice(FIRST_NAMES.split())} {self._name('sen')}" for _ in range(count)]

    def _name(self, ending: str) -> str:
        """A name that nothing else has."""
        while True:
            name = made_up_name(self._rng, ending)
            if name not in self._used:
                self._used.add(name)
                return name
