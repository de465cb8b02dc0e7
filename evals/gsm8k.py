"""GSM8K: grade school word problems; the answer is a number behind ####."""

import json
from pathlib import Path
from typing import Any

from moe_int8.evals.answers import answer_of, flexible_number, strict_number
from moe_int8.evals.prompts import Output, Prompt
from moe_int8.evals.statistics import score
from moe_int8.models.deepseek.untrusted import read_text

INSTRUCTION = "Solve this problem step by step. End with a line that holds #### and the resulting number.\n\n"


class Gsm8k:
    """The questions with their shots, and how answers to them are graded.

    Args:
        data: the questions' file, or a folder with test.jsonl and train.jsonl; each line has "question" and "answer".
            The shots are the first lines of the train.jsonl beside the questions; without one they are the first
            questions, which then are not asked.
        shots: examples in front of each question.
        num_questions: ask the first so many; None for all.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line is no such question, its answer no number, or there are too few; names file and line.
    """

    name = "gsm8k"
    stop: tuple[str, ...] = ("\nQuestion:",)  # in the completion style a model goes on with the next question
    choices: tuple[str, ...] = ()

    def __init__(self, data: Path, *, shots: int, num_questions: int | None, chat: bool) -> None:
        file = data / "test.jsonl" if data.is_dir() else data
        questions = _read(file)
        train = file.with_name("train.jsonl")
        self.shots_from = train if train.is_file() and train != file else file
        if self.shots_from == file:
            examples, questions = questions[:shots], questions[shots:]
        else:
            examples = _read(train)[:shots]
        if len(examples) < shots or not questions:
            raise ValueError(f"{self.shots_from} holds too few questions for {shots} shots; lower --shots")
        self.questions = questions[:num_questions]
        self.prompts = [
            Prompt(
                tuple((ask(example["question"], chat=chat), f" {example['answer']}") for example in examples),
                ask(question["question"], chat=chat),
                instruction=INSTRUCTION,
            )
            for question in self.questions
        ]

    def group(self, index: int) -> str:
        """All questions begin with the same shots."""
        return self.name

    def record(self, index: int, output: Output) -> dict[str, Any]:
        """Grade one answer."""
        text, cut = answer_of(output.text, thinking=output.thinking)
        target = strict_number(self.questions[index]["answer"])
        strict, flexible = strict_number(text or ""), flexible_number(text or "")
        return {
            "id": str(index),
            "question": self.questions[index]["question"],
            "target": str(target),
            "flexible": None if flexible is None else str(flexible),
            "strict": None if strict is None else str(strict),
            "correct": flexible == target,
            "strict_correct": strict == target,
            "invalid": output.error is None and flexible is None,
            "truncated": output.error is None and (text is None or (output.finish_reason == "length" and not cut)),
        }

    def rows(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The scores under both ways to find the number; the last row is the run's."""
        return [
            {
                "name": name,
                "kind": "extraction",
                **score([record[correct] for record in records]),
                "invalid": sum(record[name] is None and record["error"] is None for record in records),
            }
            for name, correct in (("strict", "strict_correct"), ("flexible", "correct"))
        ]


def ask(question: str, *, chat: bool) -> str:
    """A question as it is asked: the form of a text to continue, or the bare question of a conversation."""
    return question if chat else f"Question: {question}\nAnswer:"


def _read(file: Path) -> list[dict[str, str]]:
    questions = []
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number} is no JSON: {error}") from error
        keys = ("question", "answer")
        if not (isinstance(question, dict) and all(isinstance(question.get(key), str) for key in keys)):
            raise ValueError(f'{file}, line {number} must be {{"question": "...", "answer": "..."}}')
        if strict_number(question["answer"]) is None:
            raise ValueError(f"{file}, line {number}: the answer has no number behind ####")
        questions.append(question)
    if not questions:
        raise ValueError(f"{file} holds no questions")
    return questions
