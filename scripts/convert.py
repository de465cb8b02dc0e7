"""Convert a DeepSeek V3 or R1 checkpoint (official FP8, or BF16) to INT8 with one scale per output channel.

Runs on a CPU and needs no GPU. An interrupted run is continued by the same command.

example:
  python scripts/convert.py DeepSeek-R1 DeepSeek-R1-INT8 --workers 8 --verify
"""

import argparse
import time
from pathlib import Path

from tqdm import tqdm

from moe_int8.models.deepseek.checkpoint import CONFIG, CheckpointError
from moe_int8.models.deepseek.convert import CONFIG_STYLES, TARGETS, Settings, convert
from moe_int8.models.deepseek.verify import table, verify
from moe_int8.parallel.launch import ArgumentParser, first_rank, one_line_errors


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("source", type=Path, help="folder of the checkpoint to convert")
    parser.add_argument("result", type=Path, help="folder to write: new, empty, or of an interrupted run")
    parser.add_argument("--to", choices=TARGETS, default="int8", help="what to write; bf16 takes FP8 only")
    parser.add_argument(
        "--config-style",
        choices=CONFIG_STYLES,
        default="compressed-tensors",
        help="how config.json describes INT8; w8a8_int8 is SGLang's own",
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes, each with a shard at a time")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare source and result, which is only read if it is there",
    )
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"--workers must be 1 or more, got {args.workers}")
    if args.to == "bf16" and args.config_style != parser.get_default("config_style"):
        parser.error("--config-style describes INT8 and has no meaning with --to bf16")
    return args


def run(args: argparse.Namespace) -> None:
    start = time.monotonic()
    if not (args.verify and (args.result / CONFIG).exists()):  # config.json is written last
        done = convert(args.source, args.result, Settings(args.to, args.config_style), args.workers)
        sizes = " -> ".join(f"{tqdm.format_sizeof(size)}B" for size in (done.source_bytes, done.result_bytes))
        print(f"{args.result}: wrote {done.written} of {done.shards} shards, {sizes}, {time.monotonic() - start:.0f} s")
    if args.verify:
        errors = verify(args.source, args.result, args.workers)
        print("largest error of a weight, relative to the largest value of its row")
        print(table(errors))
        for kind, e in errors.items():
            if e.largest > e.bound:
                raise CheckpointError(
                    f"{e.worst} ({kind}) is off by {e.largest:.6f} of its row's largest value, more than rounding "
                    f"({e.bound:.6f}): {args.result} does not hold what {args.source} holds; convert it again"
                )


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if not first_rank():  # under torchrun one process converts, with --workers of its own
        return
    with one_line_errors():
        run(args)
        print(f"next: python scripts/inspect_checkpoint.py {args.result}")


if __name__ == "__main__":
    main()
