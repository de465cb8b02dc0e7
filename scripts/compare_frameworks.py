"""Compare a serving framework with itself, moe-int8 off and on: the same 20 prompts, how far the answers agree and how
fast they come.

Ask the server that was started without moe-int8 and save its answers; start it again with moe-int8 and compare.
docs/frameworks.md has the commands that start servers.

Examples:
  python scripts/compare_frameworks.py --base-url http://10.0.0.1:8000/v1 --save off.json
  python scripts/compare_frameworks.py --base-url http://10.0.0.1:8000/v1 --against off.json
"""

import argparse
import json
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

from moe_int8.evals.prompts import Prompt
from moe_int8.evals.server import Server
from moe_int8.models.deepseek.progress import progress_bar
from moe_int8.models.deepseek.untrusted import parse_json
from moe_int8.parallel.launch import ArgumentParser, one_line_errors

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "The first ten prime numbers are",
    "In 1969, the first people on the moon were",
    "To make bread, you need",
    "The derivative of x squared is",
    "A haiku about the sea:",
    "The chemical formula of table salt is",
    "def fibonacci(n):",
    "SELECT name, age FROM people WHERE",
    "Once upon a time, in a village by a river,",
    "The three laws of motion are",
    "Translate into German: Good morning, my friends.",
    "The largest planet of the solar system is",
    "Shakespeare wrote",
    "If a train travels 120 km in 2 hours, its speed is",
    "The difference between TCP and UDP is",
    "Photosynthesis is the process by which",
    "The opposite of cold is",
    "A matrix is invertible if and only if",
]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--base-url", required=True, metavar="URL", help="of an OpenAI-compatible server, up to and with /v1")
    add("--model", metavar="NAME", help="as the server calls it; without it: the first that it serves")
    add("--save", type=Path, metavar="FILE", help="write the answers here, to compare with later")
    add("--against", type=Path, metavar="FILE", help="answers saved by --save, which are taken as right")
    add("--max-tokens", type=int, default=128, metavar="N", help="tokens of an answer")
    add("--parallel", type=int, default=len(PROMPTS), metavar="N", help="requests at a time")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds without an answer")
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args(argv)
    if args.save is None and args.against is None:
        parser.error("give --save for the first server, --against for the second")
    for name in ("max_tokens", "parallel"):
        if not 1 <= getattr(args, name) <= 10**6:
            parser.error(f"--{name.replace('_', '-')} must be from 1 to 1000000, got {getattr(args, name)}")
    return args


def ask(args: argparse.Namespace) -> dict[str, Any]:
    """All answers of the server, and its output tokens a second."""
    sampling = {"max_tokens": args.max_tokens, "temperature": 0.0}
    server = Server(args.base_url, chat=False, thinking=False, sampling=sampling, timeout=args.timeout)
    model = args.model or server.first_model()
    prompts = [Prompt(shots=(), question=text) for text in PROMPTS]
    server.output(model, prompts[0])  # kernels are compiled at their first use
    answers = [""] * len(PROMPTS)
    tokens = 0
    start = time.perf_counter()
    asked = server.outputs(model, prompts, range(len(PROMPTS)), args.parallel)
    for index, output in progress_bar(iterable=asked, total=len(PROMPTS), desc="ask", unit=" prompts", leave=False):
        if output.error:
            raise ValueError(f"{args.base_url} does not answer {PROMPTS[index]!r}: {output.error}")
        answers[index] = output.text
        tokens += output.output_tokens
    seconds = time.perf_counter() - start
    return {
        "model": model,
        "max_tokens": args.max_tokens,
        "parallel": args.parallel,
        "answers": answers,
        "tokens_per_second": tokens / seconds,
    }


def saved(path: Path) -> dict[str, Any]:
    """What --save wrote.

    Raises:
        OSError, ValueError: it cannot be read, or is something else.
    """
    try:
        off = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error
    answers, speed = off.get("answers"), off.get("tokens_per_second")
    complete = isinstance(answers, list) and len(answers) == len(PROMPTS)
    if not complete or not all(isinstance(answer, str) for answer in answers or []) or not isinstance(speed, float):
        raise ValueError(f"{path} does not hold the answers to this script's prompts: write it with --save")
    return off


def compare(off: dict[str, Any], on: dict[str, Any]) -> dict[str, float]:
    """How many answers are equal, how much of an answer is equal before it differs, and both speeds.

    Raises:
        ValueError: the answers are not to the same questions.
    """
    for name in ("max_tokens", "parallel"):
        if off.get(name) != on[name]:
            raise ValueError(f"the saved answers are of --{name.replace('_', '-')} {off.get(name)}, not {on[name]}")
    pairs = list(zip(off["answers"], on["answers"], strict=True))
    shares = [equal_at_first(*pair) for pair in pairs]
    return {
        "equal": sum(left == right for left, right in pairs),
        "equal_until": sum(shares) / len(shares),
        "off_tokens_per_second": off["tokens_per_second"],
        "on_tokens_per_second": on["tokens_per_second"],
    }


def equal_at_first(left: str, right: str) -> float:
    """The share of the longer text before the first difference."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
    return same / max(len(left), len(right)) if left or right else 1.0


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with one_line_errors():
        off = None
        if args.against:
            off = saved(args.against)  # before minutes of asking
        on = ask(args)
        print(f"{on['model']}: {on['tokens_per_second']:.1f} tokens/s, {args.parallel} requests at a time")
        if args.save:
            args.save.write_text(json.dumps(on, indent=2) + "\n", encoding="utf-8")
        if off is None:
            return
        figures = compare(off, on)
        print(f"  {'equal answers':<28}{figures['equal']:>4.0f} of {len(PROMPTS)}")
        print(f"  {'of an answer, equal at first':<28}{figures['equal_until']:>8.1%}")
        speed = figures["on_tokens_per_second"] / figures["off_tokens_per_second"]
        print(f"  {'speed, on to off':<28}{speed:>8.2f}")
        if args.json:
            args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
