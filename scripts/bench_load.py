"""Time loading: GB/s from disk into the ranks' parameters, beside the speed of reading the same files in order.

The layers share their memory, so a checkpoint larger than the memory can be timed. --write first makes a checkpoint
of R1's shapes with random INT8 weights; --cold empties the page cache before each pass, which needs root.

Examples:
  python scripts/bench_load.py synthetic --write --layers 24 --experts 16
  torchrun --nproc-per-node 2 scripts/bench_load.py synthetic --cold --json benchmarks/results/load.json
"""

import argparse
import json
import os
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
from results import write_results
from safetensors.torch import save_file
from torch import nn

from moe_int8.models.deepseek.checkpoint import CONFIG, INDEX
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.formats import projection_kind
from moe_int8.models.deepseek.layout import tensor_shapes
from moe_int8.models.deepseek.model import DeepseekModel
from moe_int8.models.deepseek.published import R1
from moe_int8.models.deepseek.weights import load_weights, open_model
from moe_int8.parallel import check_tp_size, init_groups, local_device, world_size
from moe_int8.parallel.launch import ArgumentParser, first_rank, one_line_errors
from moe_int8.parallel.meeting import local_rank

GB = 1e9
R1_INT8_BYTES = 674e9  # what is loaded of it: all but layer 61
RAW_BYTES = 8 * 2**30  # enough of the files to know the disk
SHARD_BYTES = 2 * 2**30
CUT = {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0}  # of R1 in the synthetic checkpoint


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("model", type=Path, help="folder of an INT8, BF16 or FP32 checkpoint")
    add("--write", action="store_true", help="write a synthetic checkpoint there instead of loading one")
    add("--layers", type=int, default=24, metavar="N", help="with --write: layers, one of them dense")
    add("--experts", type=int, default=16, metavar="N", help="with --write: experts in a layer, a multiple of 8")
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu", help="to load to")
    add("--cold", action="store_true", help="empty the page cache first, and time reading the files in order too")
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args(argv)
    if args.experts % R1["n_group"] or args.experts < 16:
        parser.error(f"--experts must be a multiple of 8, at least 16, got {args.experts}")
    return args


def write_checkpoint(folder: Path, layers: int, experts: int) -> None:
    """Write a checkpoint of R1's shapes with random weights; only its sizes mean anything.

    Raises:
        ValueError: the folder exists.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists: give a new folder to --write, or leave --write out to load it")
    config = R1 | CUT | {"num_hidden_layers": layers, "n_routed_experts": experts}
    folder.mkdir(parents=True)
    shapes = dict(tensor_shapes(DeepseekConfig.from_dict(config)))
    codes = torch.randint(-127, 128, (max(map(prod, shapes.values())),), dtype=torch.int8)
    values = (codes.float() / 127).bfloat16()
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in shapes.items():
        if projection_kind(name):
            shard[name] = codes[: prod(shape)].view(shape).clone()  # safetensors refuses two names for one memory
            shard[f"{name}_scale"] = torch.full((shape[0], 1), shape[1] ** -0.5 / 127)
        else:
            shard[name] = values[: prod(shape)].view(shape).clone()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / CONFIG).write_text(json.dumps(config))


def share_layers(model: DeepseekModel, device: torch.device) -> None:
    """Give a model on the meta device memory, the same for parameters that differ only in their layer's number."""
    memory: dict[tuple[str, torch.Size, torch.dtype], nn.Parameter] = {}
    for name, parameter in list(model.named_parameters()):
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        key = (kind, parameter.shape, parameter.dtype)
        if key not in memory:
            memory[key] = nn.Parameter(torch.zeros_like(parameter, device=device), requires_grad=False)
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, memory[key])


def drop_page_cache() -> None:
    """Empty the kernel's page cache, so that files come from the disk.

    Raises:
        PermissionError: not root.
    """
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def raw_gb_per_s(paths: list[Path]) -> float:
    """Read the files one after another, as cat does, up to RAW_BYTES."""
    buffer = bytearray(8 * 2**20)
    total, start = 0, time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while total < RAW_BYTES and (count := file.readinto(buffer)):
                total += count
    return total / (time.perf_counter() - start) / GB


def bytes_from_disk() -> int:
    """What this process has made the kernel read from disks so far, by any of its threads."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"])


def run(args: argparse.Namespace) -> None:
    """Write the checkpoint, or load it and print how long that took."""
    if args.write:
        if first_rank():
            write_checkpoint(args.model, args.layers, args.experts)
        return
    files = open_model(args.model)
    check_tp_size(world_size(), files.config.sharded_dimensions())
    device = local_device(args.device)
    groups = init_groups(device)
    model = DeepseekModel(files.config, files.precision, groups, "meta")
    share_layers(model, device)
    paths = [files.checkpoint.path(file) for file in files.checkpoint.files()]
    row: dict[str, Any] = {"ranks": groups.tp.size, "cold": args.cold, "files": len(paths)}
    row["bytes"] = sum(path.stat().st_size for path in paths)
    ready = torch.zeros(1, dtype=torch.int64, device=device)
    if args.cold and local_rank() == 0:
        drop_page_cache()
        row["raw_gb_per_s"] = round(raw_gb_per_s(paths), 3)
        drop_page_cache()
    groups.tp.all_reduce(ready)
    before = bytes_from_disk()
    start = time.perf_counter()
    load_weights(model, files.checkpoint, quantize=files.quantize, progress=first_rank())
    groups.tp.all_reduce(ready).item()  # the slowest rank's time counts
    seconds = time.perf_counter() - start
    row["disk_bytes"] = groups.tp.all_reduce(ready.fill_(bytes_from_disk() - before)).item()
    row |= {"seconds": round(seconds, 3), "gb_per_s": round(row["bytes"] / seconds / GB, 3)}
    row["r1_seconds"] = round(R1_INT8_BYTES / row["bytes"] * seconds)
    if first_rank():
        raw = f" (reading the files in order: {row['raw_gb_per_s']} GB/s)" if args.cold else ""
        print(
            f"{row['bytes'] / GB:.1f} GB into {row['ranks']} ranks in {row['seconds']} s: {row['gb_per_s']} GB/s{raw}, "
            f"{row['disk_bytes'] / GB:.1f} GB read from disks; "
            f"R1's {R1_INT8_BYTES / GB:.0f} GB at this speed: {row['r1_seconds']} s"
        )
        if args.json:
            write_results(args.json, [row])


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with one_line_errors():
        run(args)


if __name__ == "__main__":
    main()
