"""Say what a checkpoint folder is: its format, its sizes, the memory it takes on each GPU, and what to run next.

Before a download, config.json and model.safetensors.index.json alone are enough.

Example:
  python scripts/inspect_checkpoint.py DeepSeek-R1-INT8
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_int8.models.deepseek.cache import LatentCache
from moe_int8.models.deepseek.checkpoint import Checkpoint, Index
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.layout import check_fits, check_named
from moe_int8.models.deepseek.memory import GB, weight_bytes
from moe_int8.models.deepseek.precision import Precision
from moe_int8.parallel import legal_tp_sizes
from moe_int8.parallel.launch import ArgumentParser, first_rank, one_line_errors


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    return parser.parse_args(argv)


GPUS_OF_A_NODE = 8
ROOM_FOR_WEIGHTS = 64e9  # bytes on an 80 GB card, beside cache and working memory


@dataclass(frozen=True)
class Form:
    """One way to run the checkpoint: what is int8 in it."""

    name: str
    precision: Precision


def forms_of(index: Index, form: str) -> list[Form]:
    """How a checkpoint in the format `form` can be run: as it is, or (FP8) after conversion."""
    bf16 = Form("BF16", Precision(torch.bfloat16, lambda name: False))
    if form == "int8":
        return [Form("INT8", Precision(torch.bfloat16, index.is_quantized)), bf16]
    return [Form("INT8", Precision(torch.bfloat16, lambda name: True)), bf16]


def next_step(folder: Path, form: str, weight_bytes_of: dict[int, int]) -> str:
    """The command that a user most likely wants now: convert, or generate on the fewest 80 GB cards that hold it."""
    if form != "int8":
        return f"python scripts/convert.py {folder} {folder}-INT8"
    tp_size = next((tp for tp, size in weight_bytes_of.items() if size <= ROOM_FOR_WEIGHTS), max(weight_bytes_of))
    generate = f'scripts/generate.py --model {folder} --prompt "Hello"'
    if tp_size == 1:
        return f"python {generate}"
    if tp_size <= GPUS_OF_A_NODE:
        return f"torchrun --nproc-per-node {tp_size} {generate}"
    nodes = tp_size // GPUS_OF_A_NODE
    return f"{generate} on {nodes} nodes of {GPUS_OF_A_NODE}: see 'Several nodes' in the README"


def inspect(folder: Path) -> dict[str, Any]:
    """Everything there is to say, as it goes into --json."""
    config = DeepseekConfig.from_folder(folder)
    index = Index(folder)
    complete = index.has_shards()
    if complete:
        index = checkpoint = Checkpoint(folder)
        check_fits(checkpoint, config)
        form = checkpoint.format
    else:
        check_named(index, config)
        form = index.named_format()
    sizes = legal_tp_sizes(config.sharded_dimensions())
    weights = {way.name: {tp: weight_bytes(config, way.precision, tp) for tp in sizes} for way in forms_of(index, form)}
    return {
        "folder": str(folder),
        "format": form,
        "architecture": config.architecture,
        "files": len(index.files()),
        "bytes": sum(index.path(file).stat().st_size for file in index.files()) if complete else None,
        "tensors": len(index.names()),
        "layers": config.num_hidden_layers,
        "dense_layers": config.first_k_dense_replace,
        "mtp_layers": config.num_nextn_predict_layers,
        "hidden_size": config.hidden_size,
        "attention_heads": config.num_attention_heads,
        "experts": config.n_routed_experts,
        "experts_per_token": config.num_experts_per_tok,
        "vocab_size": config.vocab_size,
        "context": config.max_position_embeddings,
        "cache_bytes_per_token": LatentCache.bytes_per_token(config, torch.bfloat16),
        "weight_bytes_per_rank": weights,
        "next": next_step(folder, form, weights["INT8"]),
    }


def show(facts: dict[str, Any]) -> None:
    """Print the facts for a person."""
    size = "none is here" if facts["bytes"] is None else f"{facts['bytes'] / GB:.3f} GB"
    print(
        f"{facts['folder']}: {facts['architecture']}, {facts['format'].upper()}, "
        f"{facts['tensors']} tensors in {facts['files']} files ({size})"
    )
    print(
        f"{facts['layers']} layers ({facts['dense_layers']} dense, {facts['mtp_layers']} more for multi-token "
        f"prediction), hidden {facts['hidden_size']}, {facts['attention_heads']} heads, {facts['experts']} experts "
        f"({facts['experts_per_token']} a token), vocabulary {facts['vocab_size']}, context {facts['context']}"
    )
    if facts["format"] == "fp8":
        print("FP8 weights do not run on cards before Hopper and Ada, and not here: convert them first.")
    print("weights on each rank in GB (the cache comes on top: ", end="")
    print(f"{facts['cache_bytes_per_token'] * 1000 / 1e6:.1f} MB per 1,000 tokens in BF16)")
    names = list(facts["weight_bytes_per_rank"])
    print("  TP " + "".join(f"{name:>10}" for name in names))
    for tp in facts["weight_bytes_per_rank"][names[0]]:
        cells = (facts["weight_bytes_per_rank"][name][tp] / GB for name in names)
        print(f"  {tp:2d} " + "".join(f"{cell:10.3f}" for cell in cells))
    print(f"next: {'download the files, then ' if facts['bytes'] is None else ''}{facts['next']}")


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if not first_rank():
        return
    with one_line_errors():
        facts = inspect(args.model)
        show(facts)
        if args.json:
            args.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
