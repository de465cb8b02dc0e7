"""Write the measured tables of the README from benchmarks/results/*.json, between their markers.

Example:
  python scripts/readme_tables.py          # --check: change nothing, fail if the README is not up to date
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from moe_int8.parallel.launch import ArgumentParser, one_line_errors

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
NAMES = {"int8_int32": "INT8", "int8_fp32": "INT8, fp32 accumulator", "bf16": "BF16"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if the README is not up to date")
    return parser.parse_args(argv)


def step_table(results: dict[str, Any]) -> str:
    """Milliseconds of a decode step (as a CUDA graph) and of prefill, a line for each TP size and number format."""
    rows = results["rows"]
    columns = sorted({(row["phase"], row["tokens"]) for row in rows})
    heads = [f"decode {tokens}" if phase == "decode" else f"prefill {tokens}" for phase, tokens in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(columns)]
    for tp in sorted({row["tp"] for row in rows}):
        for variant, name in NAMES.items():
            found = {(r["phase"], r["tokens"]): r for r in rows if (r["tp"], r["variant"]) == (tp, variant)}
            times = (found[column].get("us_graph", found[column]["us_eager"]) for column in columns)
            cells = [f"{us / 1000:.2f}" for us in times]
            lines.append(f"| TP{tp} {name} | " + " | ".join(cells) + " |")
    measured = f"{results['device']}, torch {results['torch']}, triton {results['triton']}, {results['date']}"
    return "\n".join([*lines, "", f"Milliseconds a step; {measured}."])


def filled(text: str) -> str:
    """The README with every table made anew."""

    def table(match: re.Match[str]) -> str:
        results = json.loads((RESULTS / f"{match[1]}.json").read_text(encoding="utf-8"))
        return f"<!-- table: {match[1]} -->\n{step_table(results)}\n<!-- end of table -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end of table -->", table, text, flags=re.DOTALL)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with one_line_errors():
        text = README.read_text(encoding="utf-8")
        new = filled(text)
        if args.check and new != text:
            raise ValueError("README.md is not up to date: run python scripts/readme_tables.py")
        README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
