"""Accuracy on GSM8K, grade school word problems: of a checkpoint, alone or under torchrun, or of a server.

The score takes the number behind ####, else the boxed one, else the last one; the strict score only the one behind
####. Numbers inside a think block or behind the start of another question do not count.

Examples:
  torchrun --nproc-per-node 8 scripts/eval_gsm8k.py --model R1-INT8 --style chat --output r1_int8.json
  python scripts/eval_gsm8k.py --base-url http://127.0.0.1:8000/v1 --num-questions 200
"""

import argparse
from pathlib import Path

from moe_int8.evals.command import add_options, evaluate, parse
from moe_int8.evals.data import gsm8k_folder
from moe_int8.evals.gsm8k import Gsm8k
from moe_int8.parallel.launch import ArgumentParser


def load(args: argparse.Namespace) -> Gsm8k:
    data = gsm8k_folder() if args.data is None else args.data
    return Gsm8k(data, shots=args.shots, num_questions=args.num_questions, chat=args.style == "chat")


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    add_options(parser)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="the questions (JSON lines), shots from the train.jsonl beside them; or a folder with test.jsonl and "
        "train.jsonl; without it the original files are downloaded once",
    )
    parser.add_argument("--num-questions", type=int, metavar="N", help="ask the first N; without it: all")
    evaluate(parse(parser, argv, answer_tokens=512, chat_tokens=4096), load)


if __name__ == "__main__":
    main()
