"""Compare evaluations question by question: the first file with each of the others, say BF16 with INT8.

For each pair: the questions that both, one or none got right, the exact p of McNemar's test, and the 95 % interval of
the difference. Only questions that both runs asked are compared.

Example:
  python scripts/compare_evals.py bf16.json int8.json --plot gsm8k.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

from moe_int8.evals.report import error_of
from moe_int8.evals.statistics import Z95, Paired
from moe_int8.models.deepseek.untrusted import shown
from moe_int8.parallel.launch import ArgumentParser, one_line_errors

MOST_BYTES = 1 << 30  # of a result file; R1's longest answers to all of MMLU have about as much


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="FILE", help="--output of an evaluation; two or more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the comparison here")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the scores side by side")
    args = parser.parse_args(argv)
    if len(args.runs) < 2:
        parser.error("name two files or more")
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"--{name} {path} cannot be written: its folder is missing, or it is one")
    return args


def read_run(path: Path) -> dict[str, Any]:
    """An evaluation's result, its questions by their id.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} is too large for a result")
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        run["questions"] = {question["id"]: question for question in run["questions"]}
        for question in run["questions"].values():
            if not (isinstance(question["question"], str) and isinstance(question["correct"], bool)):
                raise TypeError(question)
        for row in run["rows"]:
            float(row["score"] + (row["stderr"] or 0)), row["name"], row["kind"], int(row["n"])
        return run
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no result of an evaluation script: {shown(str(error))}") from error


def compare(a: dict[str, Any], b: dict[str, Any], what: str) -> dict[str, Any]:
    """Two runs over the questions that both have."""
    if a["task"] != b["task"]:
        raise ValueError(f"{what} are different evaluations: {a['task']} and {b['task']}")
    ids = [name for name in a["questions"] if name in b["questions"]]
    differing = [
        name for name in ids if any(a["questions"][name][k] != b["questions"][name][k] for k in ("question", "target"))
    ]
    if differing or not ids:
        reason = f"question {differing[0]} differs" if differing else "they share none"
        raise ValueError(f"{what} are over different questions: {reason}")
    paired = Paired.of(*([run["questions"][name]["correct"] for name in ids] for run in (a, b)))
    low, high = paired.interval()
    return {
        "n": paired.n,
        "left_out": len(a["questions"]) + len(b["questions"]) - 2 * paired.n,
        "both": paired.both,
        "only_a": paired.only_a,
        "only_b": paired.only_b,
        "neither": paired.neither,
        "difference": paired.difference,
        "interval95": [low, high],
        "mcnemar_p": paired.mcnemar(),
    }


def show(paths: list[Path], runs: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> None:
    """Print the runs, then the pairs."""
    width = max(len(str(path)) for path in paths)
    print(f"{runs[0]['task']:<{width}}{'questions':>11}{'score':>9}{'stderr':>9}{'failed':>8}")
    for path, run in zip(paths, runs, strict=True):
        print(f"{path!s:<{width}}{run['n']:>11}{run['score']:>9.4f}{error_of(run):>9}{run['failed']:>8}")
    for path, pair in zip(paths[1:], pairs, strict=True):
        low, high = pair["interval95"]
        print(f"\n{path} minus {paths[0]}, {pair['n']} questions ({pair['left_out']} asked by one only)")
        print(f"  both right {pair['both']}, only {paths[0]} {pair['only_a']}, only {path} {pair['only_b']}, ", end="")
        print(f"neither {pair['neither']}")
        print(f"  difference {pair['difference']:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}, ", end="")
        print(f"McNemar p {pair['mcnemar_p']:.4f}")


def draw(paths: list[Path], runs: list[dict[str, Any]], file: Path) -> None:
    """The rows of all runs side by side, with their 95 % intervals; MMLU's subjects are too many and left out."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--plot needs matplotlib: pip install 'moe-int8[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables = [{row["name"]: row for row in run["rows"] if row["kind"] != "subject"} for run in runs]
    names = [name for name in tables[0] if all(name in table for table in tables)]
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.3 * len(names), 4), layout="constrained")
    bar = 0.8 / len(runs)
    for number, (path, table) in enumerate(zip(paths, tables, strict=True)):
        places = [group + (number - (len(runs) - 1) / 2) * bar for group in range(len(names))]
        errors = [Z95 * (table[name]["stderr"] or 0) for name in names]
        axes.bar(places, [table[name]["score"] for name in names], bar, yerr=errors, capsize=3, label=path.stem)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 1)
    axes.set_ylabel(f"{runs[0]['task']}, share right")
    figure.legend(loc="outside upper center", ncols=min(len(runs), 4))
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with one_line_errors():
        runs = [read_run(path) for path in args.runs]
        pairs = [
            compare(runs[0], run, f"{args.runs[0]} and {path}")
            for path, run in zip(args.runs[1:], runs[1:], strict=True)
        ]
        show(args.runs, runs, pairs)
        if args.json:
            named = [
                {"a": str(args.runs[0]), "b": str(path), **pair}
                for path, pair in zip(args.runs[1:], pairs, strict=True)
            ]
            args.json.write_text(json.dumps({"task": runs[0]["task"], "pairs": named}, indent=2) + "\n")
        if args.plot:
            draw(args.runs, runs, args.plot)


if __name__ == "__main__":
    main()
