"""MMLU: four-choice questions of 57 subjects."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_int8.evals.answers import answer_of, choice_letter
from moe_int8.evals.prompts import Output, Prompt
from moe_int8.evals.statistics import score

LETTERS = "ABCD"
CHOICES = tuple(f" {letter}" for letter in LETTERS)  # as they follow "Answer:"
INSTRUCTION = 'Answer this multiple choice question. End with a line "Answer: " and the letter alone.\n\n'

# The four categories of the paper's own code, and the subjects in each.
_CATEGORIES = {
    "STEM": """abstract_algebra astronomy college_biology college_chemistry college_computer_science
        college_mathematics college_physics computer_security conceptual_physics electrical_engineering
        elementary_mathematics high_school_biology high_school_chemistry high_school_computer_science
        high_school_mathematics high_school_physics high_school_statistics machine_learning""",
    "humanities": """formal_logic high_school_european_history high_school_us_history high_school_world_history
        international_law jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy prehistory
        professional_law world_religions""",
    "social sciences": """econometrics high_school_geography high_school_government_and_politics
        high_school_macroeconomics high_school_microeconomics high_school_psychology human_sexuality
        professional_psychology public_relations security_studies sociology us_foreign_policy""",
    "other": """anatomy business_ethics clinical_knowledge college_medicine global_facts human_aging management
        marketing medical_genetics miscellaneous nutrition professional_accounting professional_medicine
        virology""",
}
CATEGORIES = {name: subjects.split() for name, subjects in _CATEGORIES.items()}


class Mmlu:
    """The questions with their shots, and how answers to them are graded.

    Args:
        data: a folder with test/<subject>_test.csv and, for the shots, dev/<subject>_dev.csv. A row is a question, four
            choices and the answer (A to D or 0 to 3); a header row is passed over.
        shots: examples in front of each question, the first of the subject's dev file.
        num_questions: ask the first so many of each subject; None for all.
        subjects: only these; None for all.
        generate: the model writes its answer; otherwise the likelier letter is taken.

    Raises:
        OSError: a file cannot be read.
        ValueError: a row is no such question, or a subject is missing or has too few shots; names the file.
    """

    name = "mmlu"
    stop: tuple[str, ...] = ("\n\n",)  # in the completion style the next question comes behind an empty line

    def __init__(
        self,
        data: Path,
        *,
        shots: int,
        num_questions: int | None,
        subjects: list[str] | None,
        chat: bool,
        generate: bool,
    ) -> None:
        self.choices: tuple[str, ...] = () if generate else CHOICES
        self.chat = chat
        files = {file.name.removesuffix("_test.csv"): file for file in sorted((data / "test").glob("*_test.csv"))}
        if not files:
            raise ValueError(f"{data / 'test'} holds no files <subject>_test.csv")
        unknown = set(subjects or ()) - set(files)
        if unknown:
            raise ValueError(
                f"{data / 'test'} has no {' and no '.join(sorted(f'{name}_test.csv' for name in unknown))}"
            )
        self.questions: list[tuple[str, int, list[str]]] = []  # subject, index in its file, row
        self.prompts: list[Prompt] = []
        for subject, file in files.items():
            if subjects is not None and subject not in subjects:
                continue
            dev = data / "dev" / f"{subject}_dev.csv"
            examples = _read(dev)[:shots] if shots else []
            if len(examples) < shots:
                raise ValueError(f"{dev} holds {len(examples)} questions, too few for {shots} shots; lower --shots")
            shown = tuple((ask(row, chat=chat), f"{'Answer:' if chat else ''} {row[-1]}") for row in examples)
            for index, row in enumerate(_read(file)[:num_questions]):
                self.questions.append((subject, index, row))
                self.prompts.append(Prompt(shown, ask(row, chat=chat), intro(subject), INSTRUCTION))

    def group(self, index: int) -> str:
        """The subject of a question: those of one subject begin with the same shots."""
        return self.questions[index][0]

    def record(self, index: int, output: Output) -> dict[str, Any]:
        """Grade one answer: the most likely letter, or the one that was written."""
        subject, number, row = self.questions[index]
        truncated = False
        if output.logprobs is not None:
            chosen: str | None = LETTERS[output.logprobs.index(max(output.logprobs))]
        else:
            text, cut = answer_of(output.text, thinking=output.thinking)
            if text is not None and not self.chat:
                text, _, rest = text.partition(self.stop[0])  # a server may not know stop strings
                cut = cut or bool(rest)
            chosen = choice_letter(text or "")
            # In the completion style the letter is all that is wanted; the model need not come to an end behind it.
            unfinished = output.finish_reason == "length" and not cut and chosen is None
            truncated = output.error is None and (text is None or unfinished)
        return {
            "id": f"{subject}/{number}",
            "subject": subject,
            "question": row[0],
            "target": row[-1],
            "chosen": chosen,
            "correct": chosen == row[-1],
            "invalid": output.error is None and chosen is None,
            "truncated": truncated,
        } | ({} if output.logprobs is None else {"logprobs": list(output.logprobs)})

    def rows(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The scores of each subject, of each category and of all questions, each over its questions; the last row is
        the run's."""
        subjects = list(dict.fromkeys(record["subject"] for record in records))
        parts = [(subject, "subject", [subject]) for subject in subjects]
        parts += [(name, "category", members) for name, members in CATEGORIES.items()]
        parts += [("all questions", "overall", subjects)]
        rows = []
        for name, kind, members in parts:
            own = [record for record in records if record["subject"] in members]
            if own:
                invalid = sum(record["invalid"] for record in own)
                rows.append(
                    {"name": name, "kind": kind, **score([record["correct"] for record in own]), "invalid": invalid}
                )
        return rows


def intro(subject: str) -> str:
    """What stands in front of a subject's questions in a text to continue."""
    return f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"


def ask(row: Sequence[str], *, chat: bool) -> str:
    """A question and its choices as they are asked, in a text to continue or in a conversation; `row` as in a table."""
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, row[1:5], strict=True))
    return f"{row[0]}\n{choices}" + ("" if chat else "\nAnswer:")


def _read(file: Path) -> list[list[str]]:
    """The rows of a table, their answers as letters."""
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            rows = [row for row in csv.reader(stream, strict=True) if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    read = []
    for number, row in enumerate(rows, start=1):
        answer = row[-1].strip()
        if number == 1 and answer.lower() == "answer":
            continue
        if len(row) != 6 or answer not in [*LETTERS, "0", "1", "2", "3"]:
            raise ValueError(f"{file}, row {number} must be a question, four choices and the answer, A to D or 0 to 3")
        read.append([*row[:5], answer if answer in LETTERS else LETTERS[int(answer)]])
    if not read:
        raise ValueError(f"{file} holds no questions")
    return read
