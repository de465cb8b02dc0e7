"""What a run comes to: its progress, its summary, and the table for a person."""

import sys
import time
from collections.abc import Iterable
from typing import Any, Protocol

from moe_int8.evals.prompts import Output, Prompt
from moe_int8.evals.records import Record, Records
from moe_int8.evals.statistics import score
from moe_int8.models.deepseek.progress import progress_bar


class Task(Protocol):
    """A set of questions: `Gsm8k` or `Mmlu`.

    Attributes:
        stop: what ends a text in the completion style.
        choices: the continuations to compare; empty if the model writes its answer.
    """

    name: str
    stop: tuple[str, ...]
    choices: tuple[str, ...]
    prompts: list[Prompt]
    questions: list[Any]

    def group(self, index: int) -> str:
        """A name that questions with the same shots share."""

    def record(self, index: int, output: Output) -> Record:
        """Grade one answer."""

    def rows(self, records: list[Record]) -> list[Record]:
        """The table; the last row is the run's score."""


class Run:
    """A run in progress, on rank 0: grades what comes, keeps it and shows how it stands."""

    def __init__(self, task: Task, records: Records) -> None:
        self.task, self.records = task, records
        self.tokens = {"prompt_tokens": 0, "output_tokens": 0}  # of this process, not of what it continues
        self.started = time.perf_counter()
        self.bar = progress_bar(total=len(task.prompts), initial=len(records.done), desc=task.name, unit=" questions")
        self.right = sum(record["correct"] for record in records.done.values())

    def take(self, indices: Iterable[int], outputs: Iterable[Output]) -> None:
        """Grade and keep a batch."""
        graded = {}
        for index, output in zip(indices, outputs, strict=True):
            graded[index] = self.task.record(index, output) | {
                "output": output.text,
                "finish_reason": output.finish_reason,
                "prompt_tokens": output.prompt_tokens,
                "output_tokens": output.output_tokens,
                "dropped_shots": output.dropped_shots,
                "error": output.error,
            }
            for name in self.tokens:
                self.tokens[name] += getattr(output, name)
        before = [self.records.done[index] for index in graded if index in self.records.done]  # a batch run once more
        self.right += sum(record["correct"] for record in graded.values()) - sum(r["correct"] for r in before)
        self.records.add(graded)
        accuracy = self.right / len(self.records.done)
        self.bar.set_description_str(f"{self.task.name}, accuracy {accuracy:.4f}", refresh=False)
        self.bar.update(len(self.records.done) - self.bar.n)

    def finish(self, versions: dict[str, str]) -> dict[str, Any]:
        """Write the output file and print the table; returns the summary."""
        seconds = time.perf_counter() - self.started
        self.bar.close()
        records = self.records.in_order()
        rows = self.task.rows(records)
        rates = {f"{name}_per_s": count / seconds for name, count in self.tokens.items()}
        summary = {
            "task": self.task.name,
            **score([record["correct"] for record in records]),
            "invalid": rows[-1]["invalid"],
            "truncated": sum(record["truncated"] for record in records),
            "failed": sum(record["error"] is not None for record in records),
            "first_error": next((record["error"] for record in records if record["error"] is not None), None),
            "dropped_shots": sum(record["dropped_shots"] > 0 for record in records),
            "rows": rows,
            "versions": versions,
            "timing": {"seconds": seconds, **self.tokens, **rates},
        }
        self.records.finish(summary)
        show(summary)
        return summary


def show(summary: dict[str, Any]) -> None:
    """Print the table."""
    width = max(len(row["name"]) for row in summary["rows"])
    print(f"{summary['task']:<{width}}{'questions':>11}{'score':>9}{'stderr':>9}{'invalid':>9}")
    for row in summary["rows"]:
        print(f"{row['name']:<{width}}{row['n']:>11}{row['score']:>9.4f}{error_of(row):>9}{row['invalid']:>9}")
    timing = summary["timing"]
    print(f"truncated {summary['truncated']}, failed {summary['failed']}, shots dropped in {summary['dropped_shots']}")
    print(
        f"{timing['prompt_tokens']} tokens in ({timing['prompt_tokens_per_s']:.1f}/s), {timing['output_tokens']} out "
        f"({timing['output_tokens_per_s']:.1f}/s), {timing['seconds']:.1f} s"
    )
    sys.stdout.flush()


def error_of(row: dict[str, Any]) -> str:
    """The standard error for a table; a single question has none."""
    return "-" if row["stderr"] is None else f"{row['stderr']:.4f}"
