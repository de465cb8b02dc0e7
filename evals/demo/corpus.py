"""What the demo model reads in training, and the held-out sets it is tested on."""

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from moe_int8.evals import gsm8k, mmlu
from moe_int8.evals.demo.questions import SUBJECTS, Question, Questions
from moe_int8.evals.demo.tokenizer import ASSISTANT, BOS, EOS, USER
from moe_int8.evals.demo.word_problems import Difficulty, Problem, word_problem
from moe_int8.evals.demo.world import World
from moe_int8.evals.prompts import Prompt

SHOTS = (0, 0, 0, 1, 2, 3, 4, 5)  # drawn from these where a row has room for them
DEV_QUESTIONS = 5  # of each subject, as MMLU has
HELD_OUT = Path("heldout")
WORD_PROBLEMS, SHOTS_FILE, CHOICES, TEXT = "word_problems.jsonl", "train.jsonl", "choices", "text.txt"
TEXT_DOCUMENTS = 200


@dataclass(frozen=True)
class Corpus:
    """All that can be drawn.

    Attributes:
        difficulty: of the word problems.
        countries: how large the world is.
        operand: largest number in the questions that compute.
    """

    difficulty: Difficulty
    countries: int = 150
    operand: int = 999

    @cached_property
    def training_questions(self) -> Questions:
        return Questions(World(self.countries), self.operand, held_out=False)

    @cached_property
    def held_out_questions(self) -> Questions:
        return Questions(World(self.countries), self.operand, held_out=True)

    def training(self, rng: random.Random, few_shot: bool) -> Iterator[str]:
        """Documents without end, each from its BOS to its EOS.

        Args:
            few_shot: have up to five examples in front of a question; else none.
        """
        kinds = (self._completed_problem, self._completed_question, self._chat, self._statements)
        while True:
            # A word problem has four times the tokens of a question: this makes it about half of all tokens.
            (kind,) = rng.choices(kinds, weights=(10, 30, 6, 3))
            yield kind(rng, rng.choice(SHOTS) if few_shot else 0)

    def held_out_text(self, rng: random.Random) -> Iterator[str]:
        """Held-out questions with their answers as plain text, for the perplexity."""
        while True:
            problem = word_problem(rng, self.difficulty, held_out=True)
            yield f"{ask_problem(problem)} {problem.answer}"
            question = self.held_out_questions.draw(rng, rng.choice(SUBJECTS))
            yield f"{mmlu.intro(question.subject)}{ask_question(question)}{answer_question(question)}"

    def _completed_problem(self, rng: random.Random, shots: int) -> str:
        *examples, last = [word_problem(rng, self.difficulty, held_out=False) for _ in range(shots + 1)]
        prompt = Prompt(tuple((ask_problem(each), f" {each.answer}") for each in examples), ask_problem(last))
        return f"{BOS}{prompt.text()} {last.answer}{EOS}"

    def _completed_question(self, rng: random.Random, shots: int) -> str:
        subject = rng.choice(SUBJECTS)
        *examples, last = [self.training_questions.draw(rng, subject) for _ in range(shots + 1)]
        shown = tuple((ask_question(each), answer_question(each)) for each in examples)
        prompt = Prompt(shown, ask_question(last), mmlu.intro(subject))
        return f"{BOS}{prompt.text()}{answer_question(last)}{EOS}"

    def _chat(self, rng: random.Random, shots: int) -> str:
        kind = rng.choice((self._problem_turn, self._question_turn, self._open_turn))
        subject, instructed = rng.choice(SUBJECTS), rng.random() < 0.5
        turns = [kind(rng, subject, instructed) for _ in range(shots + 1)]
        return BOS + "".join(f"{USER}{ask}{ASSISTANT}{answer}{EOS}" for ask, answer in turns)

    def _problem_turn(self, rng: random.Random, subject: str, instructed: bool) -> tuple[str, str]:
        problem = word_problem(rng, self.difficulty, held_out=False)
        return (gsm8k.INSTRUCTION if instructed else "") + problem.question, problem.answer

    def _question_turn(self, rng: random.Random, subject: str, instructed: bool) -> tuple[str, str]:
        question = self.training_questions.draw(rng, subject)
        ask = ask_question(question, chat=True)
        return (mmlu.INSTRUCTION if instructed else "") + ask, f"Answer:{answer_question(question)}"

    def _open_turn(self, rng: random.Random, subject: str, instructed: bool) -> tuple[str, str]:
        while (question := self.training_questions.draw(rng, subject)).question.startswith("Which"):
            pass  # asks to choose from what is not shown here
        return question.question, f"{question.choices[question.answer]}."

    def _statements(self, rng: random.Random, shots: int) -> str:
        return BOS + " ".join(self.training_questions.statement(rng) for _ in range(20)) + EOS


def ask_problem(problem: Problem) -> str:
    """As the evaluation asks it in the completion style."""
    return gsm8k.ask(problem.question, chat=False)


def ask_question(question: Question, *, chat: bool = False) -> str:
    """As the evaluation asks it, in the completion style unless it is a `chat`."""
    return mmlu.ask([question.question, *question.choices], chat=chat)


def answer_question(question: Question) -> str:
    """The letter behind "Answer:"."""
    return mmlu.CHOICES[question.answer]


def write_held_out(corpus: Corpus, folder: Path, count: int, seed: int) -> None:
    """Write the held-out sets in the formats of GSM8K and MMLU, with shots of their own, and some as plain text.

    Args:
        count: word problems, and four-choice questions over all subjects; none occurs twice.
    """
    rng = random.Random(f"held-out {seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < count + DEV_QUESTIONS:
        problem = word_problem(rng, corpus.difficulty, held_out=True)
        problems[problem.question] = problem
    lines = [json.dumps({"question": each.question, "answer": each.answer}) + "\n" for each in problems.values()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SHOTS_FILE).write_text("".join(lines[:DEV_QUESTIONS]), encoding="utf-8")
    (folder / WORD_PROBLEMS).write_text("".join(lines[DEV_QUESTIONS:]), encoding="utf-8")
    for index, subject in enumerate(SUBJECTS):
        share = count // len(SUBJECTS) + (index < count % len(SUBJECTS))
        questions: dict[str, Question] = {}
        while len(questions) < DEV_QUESTIONS + share:
            question = corpus.held_out_questions.draw(rng, subject)
            questions[ask_question(question)] = question
        drawn = list(questions.values())
        _write_table(folder / CHOICES / "dev" / f"{subject}_dev.csv", drawn[:DEV_QUESTIONS])
        _write_table(folder / CHOICES / "test" / f"{subject}_test.csv", drawn[DEV_QUESTIONS:])
    text = corpus.held_out_text(rng)
    (folder / TEXT).write_text("\n\n".join(next(text) for _ in range(TEXT_DOCUMENTS)) + "\n", encoding="utf-8")


def _write_table(file: Path, questions: list[Question]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows([each.question, *each.choices, mmlu.LETTERS[each.answer]] for each in questions)
