"""The records of a run, one a question, kept as they come, so that an interrupted run goes on where it was."""

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Records:
    """What is graded so far. With an output file, each batch is appended to FILE.partial at once.

    Args:
        output: the file of the finished run; None keeps nothing.
        settings: what the run's result depends on, by the name that a user knows it by.

    Raises:
        ValueError: the output is there already, or was begun with other settings, which are named.
        OSError: it cannot be written.
    """

    def __init__(self, output: Path | None, settings: dict[str, Any]) -> None:
        self.settings: dict[str, Any] = json.loads(json.dumps(settings, default=str))
        self.done: dict[int, Record] = {}
        self._output = output
        if output is None:
            return
        self._partial = output.with_name(f"{output.name}.partial")
        if self._partial.is_file():
            self._read()
        elif output.exists():
            raise ValueError(f"{output} is there already: remove it, or name another --output")
        # Written anew, for a run that was killed while it wrote leaves half a line.
        lines = [{"settings": self.settings}, *({"index": index, **record} for index, record in self.done.items())]
        _write(self._partial, "".join(_line(line) for line in lines))

    def add(self, records: dict[int, Record]) -> None:
        """Take a batch's records, by the index of the question."""
        self.done |= records
        if self._output is not None:
            with self._partial.open("a", encoding="utf-8") as stream:
                stream.write("".join(_line({"index": index, **record}) for index, record in records.items()))

    def in_order(self) -> list[Record]:
        """All records, by question."""
        return [self.done[index] for index in sorted(self.done)]

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the output: the summary, then a question a line. What failed is asked again by the next run."""
        if self._output is None:
            return
        head = json.dumps(summary | {"settings": self.settings}, indent=2)[:-2]
        questions = ",\n".join(f"    {json.dumps(record)}" for record in self.in_order())
        _write(self._output, f'{head},\n  "questions": [\n{questions}\n  ]\n}}\n')
        if not any(map(_failed, self.done.values())):
            self._partial.unlink()

    def _read(self) -> None:
        try:
            text = self._partial.read_text(encoding="utf-8")
            lines = text.split("\n")[:-1]  # a line without its end was not finished
            began, *records = [json.loads(line) for line in lines]
            then = began["settings"] | {}
            self.done = {record.pop("index"): record for record in records if not _failed(record)}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self._partial} is no begun evaluation: remove it to start anew") from error
        names = [name for name in then | self.settings if then.get(name) != self.settings.get(name)]
        if names and self.done:  # a run that got no answer leaves nothing to mix up
            differences = "; ".join(f"{name} was {then.get(name)}, is {self.settings.get(name)}" for name in names)
            raise ValueError(f"{self._partial} was begun with other settings: {differences}; remove it to start anew")


def _failed(record: Record) -> bool:
    return record.get("error") is not None


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value) + "\n"


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f"{path.name}.new")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
