"""Measure latency and throughput of offline generation: all requests are there at the start and are batched.

Prompts are random token ids of --input-len tokens, or of the lengths of a trace: a CSV with the columns ContextTokens
and GeneratedTokens, of which arrival times are not used. Answers are greedy. The first requests are run once before
the clock starts, since kernels are compiled at their first use.

Examples:
  torchrun --nproc-per-node 8 scripts/bench_generate.py --model R1-INT8 --input-len 1024 --output-len 128 --ignore-eos
  python scripts/bench_generate.py --model demo/int8 --trace conv.csv --requests 100 --json bench.json
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from results import write_results

from moe_int8.models.deepseek.bench import MAX_LENGTH, figures, measure, random_requests, read_trace
from moe_int8.models.deepseek.fingerprint import fingerprint
from moe_int8.models.deepseek.memory import explained_out_of_memory
from moe_int8.models.deepseek.sampling import SamplingParams
from moe_int8.models.deepseek.start import start_generator
from moe_int8.models.deepseek.weights import open_model
from moe_int8.parallel import check_tp_size, close_groups, init_groups, local_device, world_size
from moe_int8.parallel.launch import ArgumentParser, first_rank, one_line_errors, options, packages, say, versions


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the checkpoint: INT8, BF16 or FP32")
    add("--trace", type=Path, metavar="FILE", help="CSV of request lengths, in place of --input-len and --output-len")
    add("--input-len", type=int, default=1024, metavar="N", help="tokens of each prompt")
    add("--output-len", type=int, default=128, metavar="N", help="tokens of each answer, at most")
    add("--requests", type=int, default=32, metavar="N", help="how many; of a trace the first")
    add("--warmup", type=int, metavar="N", help="requests that run before the clock starts; without it: --max-batch")
    add("--ignore-eos", action="store_true", help="go on after the model's end token, so that lengths are as asked for")
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu", help="to run on")
    add("--dtype", choices=["auto", "int8", "bf16", "fp32"], default="auto", help="of the weights; auto: as the files")
    add("--accumulator", choices=["int32", "fp32"], default="int32", help="of the int8 GEMMs; int32 is exact")
    add("--max-batch", type=int, default=32, metavar="N", help="sequences at a time")
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer; without it: what is needed")
    add("--prefill-chunk", type=int, default=2048, metavar="N", help="prompt tokens in one pass")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts")
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args(argv)
    for name in ("input_len", "output_len", "requests"):
        if not 1 <= getattr(args, name) <= MAX_LENGTH:
            parser.error(f"--{name.replace('_', '-')} must be from 1 to {MAX_LENGTH}, got {getattr(args, name)}")
    if args.warmup is not None and args.warmup < 0:
        parser.error(f"--warmup must be 0 or more, got {args.warmup}")
    return args


def run(args: argparse.Namespace) -> None:
    """Load, measure, print and write --json."""
    first = first_rank()

    if first:
        say(versions())
    files = open_model(args.model, dtype=args.dtype, accumulator=args.accumulator)
    config = files.config
    check_tp_size(world_size(), config.sharded_dimensions())
    lengths = [(args.input_len, args.output_len)] * args.requests
    if args.trace and first:
        lengths = read_trace(args.trace, args.requests)
    params = SamplingParams.from_generation_config(args.model, temperature=0.0, ignore_eos=args.ignore_eos)
    device = local_device(args.device)
    settings = options(args, but=("model", "trace", "json")) | fingerprint(files) | packages()
    groups = init_groups(device, settings=settings)
    lengths = groups.tp.broadcast_object(lengths)

    needed = min(max(map(sum, lengths)), config.max_position_embeddings)
    max_model_len = needed if args.max_model_len is None else args.max_model_len
    max_batch = min(args.max_batch, len(lengths))
    limits = {"max_batch": max_batch, "max_model_len": max_model_len, "prefill_chunk": args.prefill_chunk}
    generator = start_generator(files, groups, device, **limits)
    requests = random_requests(lengths, config.vocab_size, args.seed)
    done = measure(generator, requests, params, warmup=max_batch if args.warmup is None else args.warmup)
    close_groups()
    if not first:
        return
    row = {
        "model": args.model.name,
        "dtype": args.dtype if args.dtype != "auto" else files.checkpoint.format,
        "accumulator": args.accumulator,
        "trace": args.trace.name if args.trace else None,
        "max_batch": max_batch,
        "ignore_eos": args.ignore_eos,
        **figures(done, groups.tp.size),
    }
    show(row, "GPUs" if device.type == "cuda" else "CPU ranks")
    if args.json:
        write_results(args.json, [row])


def show(row: dict[str, Any], unit: str) -> None:
    """Print the figures for a person."""
    print(
        f"{row['model']} ({row['dtype']}) on {row['gpus']} {unit}: {row['requests']} requests, {row['failed']} failed, "
        f"up to {row['max_batch']} at a time, {row['seconds']:.2f} s after {row['warmup_requests']} requests of warm-up"
    )
    for reason, count in row["failures"].items():
        print(f"  FAILED {count}: {reason}")
    print(f"{row['input_tokens']} tokens in, {row['output_tokens']} tokens out")
    print(f"{row['requests_per_s']:.3f} requests/s, {row['requests_per_min']:.2f} requests/min")
    for name, label in (("output", "out"), ("total", "in and out")):
        rate, each = row[f"{name}_tokens_per_s"], row[f"{name}_tokens_per_s_per_gpu"]
        print(f"{rate:.2f} tokens/s {label} on {row['gpus']} {unit}, {each:.2f} on each")
    print(f"{'ms':<34}" + "".join(f"{name:>10}" for name in ("mean", "50 %", "75 %", "95 %", "99 %")))
    for name, label in (
        ("first_token_s", "first token, with waiting"),
        ("time_per_token_s", "time per token, of each request"),
        ("token_gap_s", "from a token to the next"),
    ):
        values = row[name].values() if row[name] else [float("nan")] * 5
        print(f"{label:<34}" + "".join(f"{value * 1000:>10.2f}" for value in values))


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with one_line_errors(), explained_out_of_memory():
        run(args)


if __name__ == "__main__":
    main()
