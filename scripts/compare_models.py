"""Compare two forms of one model, say INT8 with BF16: the same tokens through both, logits side by side.

Examples:
  python scripts/compare_models.py R1-BF16 R1-INT8 --text book.txt
  torchrun --nproc-per-node 8 scripts/compare_models.py R1-INT8 R1-INT8 --dtype bf16 int8
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from moe_int8.models.deepseek.agreement import Agreement
from moe_int8.models.deepseek.fingerprint import fingerprint
from moe_int8.models.deepseek.generate import Generator
from moe_int8.models.deepseek.progress import progress_bar
from moe_int8.models.deepseek.text import encode_prompt, load_tokenizer
from moe_int8.models.deepseek.untrusted import read_text
from moe_int8.models.deepseek.weights import load_model, open_model
from moe_int8.parallel import check_tp_size, init_groups, local_device, world_size
from moe_int8.parallel.launch import ArgumentParser, first_rank, one_line_errors, options, packages, say

MOST = 10**6  # texts, and tokens of a text


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("reference", type=Path, help="folder of the checkpoint that is taken as right")
    add("candidate", type=Path, help="folder of the one to judge")
    add(
        "--dtype",
        nargs=2,
        default=["auto", "auto"],
        metavar=("REF", "CAND"),
        help="as in generate.py",
    )
    add("--accumulator", choices=["int32", "fp32"], default="int32", help="of the int8 GEMMs")
    add(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="to run on",
    )
    add("--text", type=Path, metavar="FILE", help="text to read; without it: random tokens, enough for random weights")
    add("--sequences", type=int, default=8, metavar="N", help="texts to compare on")
    add("--length", type=int, default=128, metavar="N", help="tokens in each")
    add("--seed", type=int, default=0, help="of the random tokens")
    add("--verdict", metavar="NAME", help="end with a line 'NAME: ok' or 'NAME: failed'; a failure exits with 1 anyway")
    add("--min-top1", type=float, default=0.0, metavar="X", help="ok needs this share of equal top-1 tokens")
    add(
        "--max-kl",
        type=float,
        default=float("inf"),
        metavar="X",
        help="ok needs a mean KL divergence of at most X nats",
    )
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args(argv)
    for name in ("sequences", "length"):
        if not 1 <= getattr(args, name) <= MOST:
            parser.error(f"--{name} must be from 1 to {MOST}, got {getattr(args, name)}")
    return args


def token_ids(args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """--sequences lists of --length ids, from the text or at random."""
    if args.text is None:
        generator = torch.Generator().manual_seed(args.seed)
        return torch.randint(vocab_size, (args.sequences, args.length), generator=generator).tolist()
    ids = encode_prompt(load_tokenizer(args.reference), read_text(args.text))
    needed = args.sequences * args.length
    if len(ids) < needed:
        raise ValueError(
            f"{args.text} has {len(ids)} tokens, {args.sequences} texts of {args.length} take {needed}: give a longer "
            "one, or lower --sequences or --length"
        )
    return [ids[start : start + args.length] for start in range(0, needed, args.length)]


def run(args: argparse.Namespace) -> bool:
    """Compare, print, and return the verdict."""
    first = first_rank()

    pairs = zip((args.reference, args.candidate), args.dtype, strict=True)
    files = [open_model(folder, dtype=dtype, accumulator=args.accumulator) for folder, dtype in pairs]
    if files[0].config != files[1].config:
        raise ValueError(f"{args.reference} and {args.candidate} are not the same model: their config.json differ")
    check_tp_size(world_size(), files[0].config.sharded_dimensions())
    rows = token_ids(args, files[0].config.vocab_size)
    device = local_device(args.device)
    settings = options(args, but=("reference", "candidate", "text", "json")) | packages() | {"tokens": rows}
    for role, each in zip(("reference", "candidate"), files, strict=True):
        settings |= {f"{role} {name}": value for name, value in fingerprint(each).items()}
    groups = init_groups(device, settings=settings)
    models = [load_model(each, groups, device=device, say=say) for each in files]
    generators = [Generator(model, max_batch=1, max_model_len=args.length) for model in models]
    agreement = Agreement()
    for row in progress_bar(iterable=rows, desc="compare", unit=" texts", disable=not first, leave=False):
        agreement.add(*(generator.score(row) for generator in generators))

    ok = agreement.top1 >= args.min_top1 and agreement.kl <= args.max_kl
    if first:
        show(args, agreement, ok)
    return ok


def show(args: argparse.Namespace, agreement: Agreement, ok: bool) -> None:
    """Print the table and the verdict, write --json."""
    print(f"{args.candidate} against {args.reference}, {agreement.positions} positions")
    for label, value, limit in (
        ("same top-1 token", f"{agreement.top1:.4f}", f"at least {args.min_top1}" if args.min_top1 else ""),
        ("mean KL (nats)", f"{agreement.kl:.5f}", f"at most {args.max_kl}" if args.max_kl < float("inf") else ""),
        ("largest logit difference", f"{agreement.largest_difference:.4f}", ""),
    ):
        print(f"  {label:<26}{value:>10}  {limit}".rstrip())
    if args.json:
        args.json.write_text(
            json.dumps(asdict(agreement) | {"top1": agreement.top1, "kl": agreement.kl}, indent=2) + "\n"
        )
    if args.verdict:
        print(f"{args.verdict}: {'ok' if ok else 'failed'}, top-1 {agreement.top1:.4f}, KL {agreement.kl:.5f}")


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with one_line_errors():
        ok = run(args)
    if not ok:
        sys.exit(1)


if __name__ == "__main__":
    main()
