"""Train the small DeepSeek-V3 model of assets/demo on one GPU; write it as a BF16 checkpoint with its held-out sets.

Word problems and four-choice questions are generated, so nothing is downloaded. The model is meant to be right about
nine times in ten, so that a loss of accuracy shows; --steps, --amount, --factor, --countries and --operand make the
questions harder or easier.

Examples:
  python scripts/train_demo_model.py --output assets/demo --json train.json
  python scripts/train_demo_model.py --output /tmp/trial --device cpu --size tiny --updates 300 --batch-tokens 4096
"""

import argparse
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import torch
from results import write_results

from moe_int8.evals.demo.card import card
from moe_int8.evals.demo.check import check
from moe_int8.evals.demo.checkpoint import write_checkpoint
from moe_int8.evals.demo.corpus import HELD_OUT, Corpus, write_held_out
from moe_int8.evals.demo.model import ROWS, SIZES, build_model
from moe_int8.evals.demo.tokenizer import build_tokenizer
from moe_int8.evals.demo.training import Plan, train
from moe_int8.evals.demo.word_problems import Difficulty
from moe_int8.parallel import world_size
from moe_int8.parallel.launch import ArgumentParser, one_line_errors, versions

TOKENIZER_DOCUMENTS = 6000


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FOLDER", help="where the checkpoint goes; must not exist yet")
    add("--size", choices=list(SIZES), default="demo", help="of the model; tiny is for a trial on a CPU")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=6.5, metavar="M", help="how long to train")
    length.add_argument("--updates", type=int, metavar="N", help="train for so many updates, however long they take")
    add("--batch-tokens", type=int, default=65536, metavar="N", help="tokens in an update")
    add("--lr", type=float, default=2e-3, metavar="X", help="highest learning rate")
    add("--steps", type=int, nargs=2, default=[3, 8], metavar="N", help="fewest and most calculations of a problem")
    add("--amount", type=int, default=999, metavar="N", help="largest number that a problem adds or takes away")
    add("--factor", type=int, default=12, metavar="N", help="largest number that it multiplies or divides by")
    add("--countries", type=int, default=150, metavar="N", help="in the world that the questions are about")
    add("--operand", type=int, default=999, metavar="N", help="largest number in the questions that compute")
    add("--held-out", type=int, default=5000, metavar="N", help="word problems, and four-choice questions, to write")
    add("--check", type=int, default=512, metavar="N", help="of each, to answer after the training")
    add("--seed", type=int, default=0, metavar="N", help="of weights and text")
    add("--workers", type=int, default=8, metavar="N", help="processes that write the training text")
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu", help="to train on")
    add("--json", type=Path, metavar="FILE", help="also write losses, the experts' usage and the accuracy here")
    args = parser.parse_args(argv)
    row = ROWS[args.size][1]
    if args.batch_tokens < row or args.batch_tokens % row:
        parser.error(f"--batch-tokens must be a multiple of {row}, got {args.batch_tokens}")
    for name, least in (("updates", 1), ("held_out", 8), ("check", 8), ("workers", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be {least} or more, got {value}")
    for name in ("minutes", "lr"):
        if not 0 < getattr(args, name) < float("inf"):
            parser.error(f"--{name} must be above 0, got {getattr(args, name)}")
    if world_size() > 1:
        parser.error("the training runs in one process, without torchrun")
    if args.output.exists():
        parser.error(f"--output {args.output} exists already: delete it or choose another folder")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json {args.json} cannot be written: its folder is missing")
    return args


def run(args: argparse.Namespace) -> None:
    """Write the held-out sets, train, write the checkpoint, check it, report."""
    print(versions(), file=sys.stderr, flush=True)
    config = SIZES[args.size]
    corpus = Corpus(Difficulty(tuple(args.steps), args.amount, args.factor), args.countries, args.operand)
    documents = itertools.islice(corpus.training(random.Random(args.seed), few_shot=False), TOKENIZER_DOCUMENTS)
    tokenizer = build_tokenizer(documents, config["vocab_size"])
    held_out = args.output / HELD_OUT
    write_held_out(corpus, held_out, args.held_out, args.seed)

    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    model = build_model(config, device)
    plan = Plan(
        minutes=None if args.updates else args.minutes,
        updates=args.updates,
        batch_tokens=args.batch_tokens,
        rows=ROWS[args.size],
        learning_rate=args.lr,
        seed=args.seed,
        workers=args.workers,
    )
    history = train(model, corpus, tokenizer, plan)
    write_checkpoint(model.state_dict(), config, tokenizer, args.output)
    row: dict[str, Any] = {
        "size": args.size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "steps": args.steps,
        "amount": args.amount,
        "factor": args.factor,
        "countries": args.countries,
        "operand": args.operand,
        "batch_tokens": args.batch_tokens,
        "lr": args.lr,
        "seed": args.seed,
        **vars(history),
        "tokens_per_s": history.tokens / history.seconds,
        "config": config,
    }
    show_training(row)
    if args.json:
        write_results(args.json, [row])  # once more with the accuracy: it is not lost if that fails
    row["accuracy"] = check(args.output, held_out, args.check, device)
    show_accuracy(row["accuracy"])
    country = next(iter(corpus.training_questions.world.facts["capital"]))
    (args.output / "README.md").write_text(card(row, f"What is the capital of {country}?"), encoding="utf-8")
    if args.json:
        write_results(args.json, [row])


def show_training(row: dict[str, Any]) -> None:
    print(
        f"{row['updates']} updates, {row['tokens'] / 1e6:.1f} million tokens in {row['seconds']:.0f} s "
        f"({row['tokens_per_s']:.0f} tokens/s), loss {row['losses'][-1][1]:.3f}"
    )
    for layer, shares in enumerate(row["usage"], start=row["config"]["first_k_dense_replace"]):
        print(f"  layer {layer}: experts have {min(shares):.1%} to {max(shares):.1%} of the choices")


def show_accuracy(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(f"{row['set']}, {row['shots']} shots: {row['score']:.3f} +- {row['stderr']:.3f} of {row['n']}")
        for part in row["parts"]:
            print(f"  {part['name']:<30}{part['score']:>7.3f} of {part['n']}")


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with one_line_errors():
        run(args)


if __name__ == "__main__":
    main()
