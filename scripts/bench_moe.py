"""Time the fused MoE of DeepSeek R1's shapes on one rank: int8 with both accumulators, BF16, and the hardware's floor.

A call is the whole operator, from activations and routing to the summed output. Several sets of inputs take turns, so
that weights come from memory; up to 512 tokens the calls run as a CUDA graph.

Examples:
  python scripts/bench_moe.py --json benchmarks/results/moe_h200.json --plot moe.png
  python scripts/bench_moe.py --inter 2048 --local-experts 16 --routing zipf
"""

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from results import write_results
from timing import floor_us, median_us

from moe_int8.models.deepseek.moe import experts_float
from moe_int8.models.deepseek.published import R1
from moe_int8.moe import fused_moe
from moe_int8.parallel.launch import ArgumentParser, one_line_errors

GRAPH_UP_TO = 512  # tokens; longer calls hide their launches
SETS = 8  # of inputs in a run
ROUTINGS = ("uniform", "eight", "zipf")
LABELS = {"ours": "int8, int32 accumulator", "ours_fp32acc": "int8, fp32 accumulator", "bf16": "BF16"}


class Inputs(NamedTuple):
    """One call's activations [M, K] and routing [M, topk]."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    sizes = [1, 4, 8, 16, 64, 256, 512, 2048, 8192]
    add("--inter", type=int, nargs="+", default=[128, 256], metavar="I", help="intermediate sizes: 2048 / TP")
    add("--batch-sizes", type=int, nargs="+", default=sizes, metavar="M", help="tokens in a call")
    add("--experts", type=int, default=R1["n_routed_experts"], metavar="E", help="experts of a layer")
    add("--local-experts", type=int, metavar="E", help="how many of them are on this rank; without it: all")
    add("--topk", type=int, default=R1["num_experts_per_tok"], metavar="N", help="experts of a token")
    add("--hidden", type=int, default=R1["hidden_size"], metavar="K", help="hidden size")
    add("--routing", choices=ROUTINGS, default="uniform", help="all experts alike, only eight, or Zipf's law")
    add("--json", type=Path, metavar="FILE", help="also write the rows here")
    add("--plot", type=Path, metavar="FILE", help="draw time over M and the gain over BF16 into this PNG")
    args = parser.parse_args(argv)
    if not 1 <= args.topk <= args.experts:
        parser.error(f"--topk must be from 1 to --experts, {args.experts}, got {args.topk}")
    if args.local_experts is not None and not 1 <= args.local_experts <= args.experts:
        parser.error(f"--local-experts must be from 1 to --experts, {args.experts}, got {args.local_experts}")
    return args


def routing(M: int, E: int, topk: int, kind: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights and ids [M, topk]; no token takes an expert twice."""
    popularity = torch.ones(E, device=device)
    if kind == "eight":
        popularity[max(topk, 8) :] = 0
    elif kind == "zipf":
        popularity = 1 / torch.arange(1, E + 1, device=device)
    ids = torch.multinomial(popularity.expand(M, E), topk)
    return torch.rand(M, topk, device=device) + 0.1, ids.to(torch.int32)


def bench(args: argparse.Namespace, inter: int, device: str) -> list[dict[str, Any]]:
    """Time all batch sizes at one intermediate size."""
    E, K = args.local_experts or args.experts, args.hidden
    expert_map = None
    if args.experts > E:
        expert_map = torch.full((args.experts,), -1, dtype=torch.int32, device=device)
        expert_map[:E] = torch.arange(E, device=device)
    w13 = torch.randint(-127, 128, (E, 2 * inter, K), dtype=torch.int8, device=device)
    w2 = torch.randint(-127, 128, (E, K, inter), dtype=torch.int8, device=device)
    w13_scale = (torch.rand(E, 2 * inter, device=device) + 0.5) / (73 * math.sqrt(K))
    w2_scale = (torch.rand(E, K, device=device) + 0.5) / (73 * math.sqrt(inter))
    w13_bf16, w2_bf16 = w13.bfloat16(), w2.bfloat16()

    rows = []
    for M in args.batch_sizes:
        sets = [
            Inputs(
                torch.randn(M, K, device=device).bfloat16(),
                *routing(M, args.experts, args.topk, args.routing, device),
            )
            for _ in range(SETS if M <= GRAPH_UP_TO else 2)
        ]

        def ours(accumulator: str, sets: list[Inputs] = sets) -> list[Any]:
            return [
                lambda inputs=inputs: fused_moe(
                    inputs.x,
                    w13,
                    w13_scale,
                    w2,
                    w2_scale,
                    *inputs[1:],
                    expert_map=expert_map,
                    accumulator=accumulator,
                )
                for inputs in sets
            ]

        variants = {"ours": ours("int32"), "ours_fp32acc": ours("fp32")}
        if expert_map is None:  # the BF16 path of the model knows no other ranks' experts
            variants["bf16"] = [
                lambda inputs=inputs: experts_float(inputs.x, w13_bf16, w2_bf16, *inputs[1:]) for inputs in sets
            ]
        graph = M <= GRAPH_UP_TO
        row: dict[str, Any] = {"M": M, "I": inter, "E": args.experts, "topk": args.topk, "K": K}
        row |= {"local_experts": E, "routing": args.routing}
        row["us"] = {name: round(median_us(calls, graph=graph), 1) for name, calls in variants.items()}
        local = [ids[ids < E] for *_, ids in sets]
        active = sum(ids.unique().numel() for ids in local) / len(local)
        slots = sum(ids.numel() for ids in local) / len(local)
        floor = floor_us(active * 3 * inter * K + M * K * 4, slots * 6 * inter * K)
        row["active_experts"] = round(active, 1)
        if floor is not None:
            row["floor_us"] = round(floor, 1)
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row for a person."""
    us = row["us"]
    text = f"I={row['I']:<5} M={row['M']:<6}" + "".join(f"{name} {time:9.1f} us  " for name, time in us.items())
    if "bf16" in us:
        text += f"BF16 / ours {us['bf16'] / us['ours']:5.2f}  "
    if "floor_us" in row:
        text += f"floor {row['floor_us']:8.1f} us  ours / floor {us['ours'] / row['floor_us']:5.2f}"
    return text


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw time over M beside the floor, and the gain over BF16."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    sizes = sorted({row["I"] for row in rows})
    figure, axes = plt.subplots(2, len(sizes), figsize=(6 * len(sizes), 8), squeeze=False)
    for column, inter in enumerate(sizes):
        chosen = [row for row in rows if row["I"] == inter]
        M = [row["M"] for row in chosen]
        times, gain = axes[0][column], axes[1][column]
        for name, label in LABELS.items():
            if name in chosen[0]["us"]:
                times.plot(M, [row["us"][name] for row in chosen], marker="o", label=label)
        if "floor_us" in chosen[0]:
            times.plot(M, [row["floor_us"] for row in chosen], "k--", label="hardware's floor")
        times.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds", title=f"fused MoE, I = {inter}")
        times.legend()
        if "bf16" in chosen[0]["us"]:
            gain.bar([str(m) for m in M], [row["us"]["bf16"] / row["us"]["ours"] for row in chosen])
            gain.axhline(1, color="k", linewidth=0.5)
        gain.set(xlabel="tokens", ylabel="BF16 / INT8")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with one_line_errors():
        torch.manual_seed(0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        rows: list[dict[str, Any]] = []
        for inter in args.inter:
            rows += bench(args, inter, device)
            if args.json:  # after each, so that a later failure loses nothing
                write_results(args.json, rows)
        if args.plot:
            plot(rows, args.plot)


if __name__ == "__main__":
    main()
