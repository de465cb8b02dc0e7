"""Accuracy on MMLU, four-choice questions of 57 subjects: of a checkpoint, alone or under torchrun, or of a server.

In process the most likely of " A", " B", " C", " D" is the answer; with --generate, --style chat or --base-url the
model writes it. The score is over the questions; subjects and categories are listed, each over its questions.

Examples:
  torchrun --nproc-per-node 8 scripts/eval_mmlu.py --model R1-INT8 --output r1_int8.json
  python scripts/eval_mmlu.py --base-url http://127.0.0.1:8000/v1 --subjects anatomy virology --num-questions 50
"""

import argparse
from pathlib import Path

from moe_int8.evals.command import add_options, evaluate, parse
from moe_int8.evals.data import mmlu_folder
from moe_int8.evals.mmlu import Mmlu
from moe_int8.parallel.launch import ArgumentParser


def load(args: argparse.Namespace) -> Mmlu:
    return Mmlu(
        mmlu_folder() if args.data is None else args.data,
        shots=args.shots,
        num_questions=args.num_questions,
        subjects=args.subjects,
        chat=args.style == "chat",
        generate=args.generate,
    )


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    add_options(parser)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="with test/<subject>_test.csv and dev/<subject>_dev.csv; without it the originals are downloaded once",
    )
    parser.add_argument("--num-questions", type=int, metavar="N", help="ask the first N of each subject; otherwise all")
    parser.add_argument("--subjects", nargs="+", metavar="NAME", help="only these; without it: all in the folder")
    parser.add_argument("--generate", action="store_true", help="let the model write its answer")
    args = parse(parser, argv, answer_tokens=16, chat_tokens=4096)
    args.generate = args.generate or args.style == "chat" or args.base_url is not None
    evaluate(args, load)


if __name__ == "__main__":
    main()
