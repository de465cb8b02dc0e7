"""Time decode and prefill steps of DeepSeek R1's true layer shapes, with random weights and no checkpoint.

A few layers are enough: the step's time is theirs and the head's. Alone, one process plays rank 0 of --tp ranks: all
shapes are that rank's, and nothing is communicated. Under torchrun the ranks are real, and the share of the all-reduce
is measured.

Examples:
  python scripts/bench_step.py --tp 16 --json benchmarks/results/step_h200.json
  torchrun --nproc-per-node 8 scripts/bench_step.py
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results import write_results

from moe_int8.models.deepseek.cache import BLOCK_SIZE, Batch, LatentCache, blocks_for
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.memory import weight_bytes
from moe_int8.models.deepseek.model import DeepseekModel
from moe_int8.models.deepseek.precision import Precision
from moe_int8.models.deepseek.published import R1
from moe_int8.models.deepseek.random_weights import fill_randomly
from moe_int8.parallel import Group, Groups, init_groups, local_device, world_size
from moe_int8.parallel.launch import ArgumentParser, first_rank, one_line_errors

VARIANTS = {"int8_int32": (True, "int32"), "int8_fp32": (True, "fp32"), "bf16": (False, "int32")}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add(
        "--tp",
        type=int,
        nargs="+",
        default=[16, 8],
        metavar="N",
        help="ranks whose shapes to time (not under torchrun)",
    )
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="number formats of the weights")
    add("--layers", type=int, default=4, metavar="N", help="layers, one of them dense")
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 64], metavar="B", help="sequences in a decode step")
    add("--context", type=int, default=1024, metavar="N", help="tokens of each sequence in the cache")
    add("--prefill", type=int, default=2048, metavar="N", help="tokens in the prefill step")
    add("--repeats", type=int, default=20, metavar="N", help="timed steps, of which the median counts")
    add("--json", type=Path, metavar="FILE", help="also write the rows here")
    return parser.parse_args(argv)


def fake_groups(tp_size: int) -> Groups:
    """Rank 0 of `tp_size` ranks that are not there: collectives return at once."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if tp_size == 1:
        return Groups()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=tp_size, store=FakeStore())
    return Groups(tp=Group(0, tp_size, dist.group.WORLD))


def decode_batch(batch_size: int, context: int, device: torch.device) -> tuple[torch.Tensor, Batch]:
    """One token for each sequence, behind `context` - 1 others."""
    width = blocks_for(context)
    table = torch.arange(batch_size * width, device=device).view(batch_size, width)
    place = context - 1
    return torch.randint(R1["vocab_size"], (batch_size,), device=device), Batch(
        positions=torch.full((batch_size,), place, device=device),
        slots=table[:, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE,
        block_table=table,
        lengths=torch.full((batch_size,), context, device=device),
    )


def prefill_batch(tokens: int, device: torch.device) -> tuple[torch.Tensor, Batch]:
    """One sequence's first `tokens` tokens."""
    return torch.randint(R1["vocab_size"], (tokens,), device=device), Batch(
        positions=torch.arange(tokens, device=device),
        slots=torch.arange(tokens, device=device),
        block_table=torch.arange(blocks_for(tokens), device=device)[None],
        lengths=torch.tensor([tokens], device=device),
        spans=[range(tokens)],
    )


def median_us(step: Callable[[], object], repeats: int) -> float:
    """Median microseconds of a step, from start to the device's end, after two that do not count."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[2:])


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph, which takes the time of launching kernels out of it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def all_reduce_us(group: Group, tokens: int, layers: int, repeats: int) -> float:
    """Microseconds of a step's all-reduces alone: two a layer, one behind the embedding."""
    x = torch.randn(tokens, R1["hidden_size"], device="cuda").bfloat16()

    def step() -> None:
        for _ in range(2 * layers + 1):
            group.all_reduce(x.zero_())

    return median_us(captured(step), repeats)


def bench(
    args: argparse.Namespace, variant: str, groups: Groups, device: torch.device, real: bool
) -> list[dict[str, Any]]:
    """Time one form of the model on this rank."""
    config = DeepseekConfig.from_dict(R1 | {"num_hidden_layers": args.layers, "first_k_dense_replace": 1})
    int8, accumulator = VARIANTS[variant]
    precision = Precision(torch.bfloat16, lambda name: int8, accumulator)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    model = DeepseekModel(config, precision, groups, device)
    used = torch.cuda.memory_allocated(device) - before
    predicted = weight_bytes(config, precision, groups.tp.size)
    fill_randomly(model)
    blocks = max(max(args.batch_sizes) * blocks_for(args.context), blocks_for(args.prefill))
    cache = LatentCache(config, blocks, torch.bfloat16, device)
    cache.pool.normal_()

    rows = []
    phases = [("decode", size, decode_batch(size, args.context, device)) for size in args.batch_sizes]
    phases.append(("prefill", args.prefill, prefill_batch(args.prefill, device)))
    for phase, tokens, (token_ids, batch) in phases:

        def step(token_ids: torch.Tensor = token_ids, batch: Batch = batch) -> torch.Tensor:
            hidden, _ = model(token_ids, batch, cache)
            return model.logits(hidden[-max(args.batch_sizes) :]).argmax(-1)

        row: dict[str, Any] = {"tp": groups.tp.size, "variant": variant, "layers": args.layers, "phase": phase}
        row |= {"tokens": tokens, "context": args.context if phase == "decode" else tokens}
        row["us_eager"] = round(median_us(step, args.repeats), 1)
        us = row["us_eager"]
        if phase == "decode":
            us = row["us_graph"] = round(median_us(captured(step), args.repeats), 1)
            if real:
                row["us_all_reduce"] = round(all_reduce_us(groups.tp, tokens, args.layers, args.repeats), 1)
        row["tokens_per_s"] = round(tokens / us * 1e6, 1)
        row |= {"weight_bytes": used, "weight_bytes_predicted": predicted}
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with one_line_errors():
        if not torch.cuda.is_available():
            raise ValueError("needs a GPU: a CPU's times say nothing of the kernels")
        device = local_device("cuda")
        real = world_size() > 1
        rows: list[dict[str, Any]] = []
        joined = init_groups(device) if real else None
        for tp_size in [world_size()] if real else args.tp:
            groups = joined or fake_groups(tp_size)
            for variant in args.variants:
                with torch.inference_mode():
                    new = bench(args, variant, groups, device, real)
                gc.collect()
                torch.cuda.empty_cache()
                rows += new
                for row in new if first_rank() else []:
                    print(
                        f"TP{row['tp']:<3} {row['variant']:<11} {row['phase']:<8}{row['tokens']:5d} tokens  eager "
                        f"{row['us_eager']:9.1f} us  graph {row.get('us_graph', float('nan')):9.1f} us  "
                        f"{row['tokens_per_s']:10.1f} tokens/s  weights {row['weight_bytes'] / 1e9:.2f} GB"
                        + (f"  all-reduce {row['us_all_reduce']:.1f} us" if "us_all_reduce" in row else ""),
                        flush=True,
                    )
                if args.json and first_rank():  # after each, so that a later failure loses nothing
                    write_results(args.json, rows)


if __name__ == "__main__":
    main()
