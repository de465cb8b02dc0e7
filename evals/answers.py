"""From a model's text to its answer: without its thinking, cut before the next question, as a number or a letter."""

import re
from fractions import Fraction
from typing import NamedTuple

THINK, END_THINK = "<think>", "</think>"
MAX_DIGITS = 100  # a longer number is a model that repeats itself

_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)
_NEXT_QUESTION = re.compile(r"\n[ \t*#]*(?:Question|Problem|Q)(?:[ \t]*[0-9]+)?[ \t*]*:")

# What LaTeX and typesetting put between or before digits, as plain text. "8{,}500", "8\,500" and "8,\!500" are 8,500.
_THIN = "[\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}]"
_PLAIN = (
    (re.compile("\N{MINUS SIGN}"), "-"),
    (re.compile(rf"(?<=[0-9])(?:\{{,\}}|,?\\[,;:! ]|{_THIN})(?=[0-9]{{3}})"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\[dt]?frac\{([0-9.,]+)\}\{([0-9.,]+)\}"), r"\1/\2"),
)
# A minus is a sign only where no operand stands before it; a comma belongs to the number only before three digits.
_NUMBER = (
    r"(?P<sign>(?<![\w)\]}])-[$£€]?)?"
    r"(?P<digits>(?>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?>\.[0-9]+)?|(?<![\w.])\.[0-9]++)"
    r"(?:/(?P<divisor>[0-9]++))?"
)
_ANY_NUMBER = re.compile(_NUMBER)
# "#### 2. Add them up" is a heading, not an answer.
_MARKED_NUMBER = re.compile(rf"####[ \t*$£€]*{_NUMBER}(?![.):][ \t]*\**[A-Za-z])")

# "A" before a small letter is mostly the article.
_LETTER = r"(?<![A-Za-z'])(?P<letter>[A-D])(?![A-Za-z'])(?!(?<=A)\s+(?!is\b)[a-z])"
_ANY_LETTER = re.compile(_LETTER)
_LEADING_LETTER = re.compile(rf"[\s(*\[\"']*{_LETTER}")
_NAMED_LETTER = re.compile(rf"(?i:answer(?:\s+is)?)[\s:*(\[\"'$]*(?:\\text\{{)?{_LETTER}")


class Answer(NamedTuple):
    """What counts of an output.

    Attributes:
        text: outside of think blocks and before the next question; None if a think block was never closed.
        cut: whether the model ran on into another question.
    """

    text: str | None
    cut: bool


def answer_of(output: str, *, thinking: bool = False) -> Answer:
    """Take thinking and run-on away.

    Args:
        output: what the model wrote.
        thinking: whether the prompt had opened a think block already.
    """
    rest = _THOUGHTS.sub("", THINK + output if thinking else output)
    rest = rest.rpartition(END_THINK)[2]  # closed, and opened by the prompt
    run_on = next((found for found in _NEXT_QUESTION.finditer(rest) if rest[: found.start()].strip()), None)
    if run_on:
        rest = rest[: run_on.start()]
    return Answer(None if THINK in rest else rest.strip(), run_on is not None)


def strict_number(text: str) -> Fraction | None:
    """The number behind the first `####`."""
    found = _MARKED_NUMBER.search(_plain(text))
    return _value(found) if found else None


def flexible_number(text: str) -> Fraction | None:
    """The number behind `####`, else in the last \\boxed{}, else the last one of the text."""
    if (number := strict_number(text)) is not None:
        return number
    text = _plain(text)
    return next((number for part in (_last_box(text), text) if (number := _last_number(part)) is not None), None)


def choice_letter(text: str) -> str | None:
    """The letter A to D that a written answer chooses: boxed, behind "answer is", in front, or the last that stands
    alone."""
    named = _last(_NAMED_LETTER, text)
    for found in (_last(_ANY_LETTER, _last_box(text)), named, _LEADING_LETTER.match(text), _last(_ANY_LETTER, text)):
        if found:
            return found["letter"]
    return None


def _plain(text: str) -> str:
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    return text


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007 - the last one is what is asked for
        pass
    return found


def _last_number(text: str) -> Fraction | None:
    found = _last(_ANY_NUMBER, text)
    return _value(found) if found else None


def _last_box(text: str) -> str:
    """What stands in the last \\boxed{}, with its inner braces; empty if there is none or it is not closed."""
    start = text.rfind("\\boxed{") + len("\\boxed{")
    if start < len("\\boxed{"):
        return ""
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start:end]
    return ""


def _value(found: re.Match[str]) -> Fraction | None:
    digits, divisor = found["digits"].replace(",", ""), found["divisor"] or "1"
    if len(digits) > MAX_DIGITS or len(divisor) > MAX_DIGITS or not int(divisor):
        return None
    value = Fraction(digits) / int(divisor)
    return -value if found["sign"] else value
