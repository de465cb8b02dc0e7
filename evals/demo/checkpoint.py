"""A trained demo model as files in the layout of the official BF16 checkpoints."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from moe_int8.evals.demo.model import CONTEXT
from moe_int8.evals.demo.tokenizer import write_tokenizer

SHARD_BYTES = 12 * 2**20
GENERATION_CONFIG = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
KEEP_FP32 = "e_score_correction_bias"


def write_checkpoint(
    state: dict[str, torch.Tensor], config: dict[str, Any], tokenizer: Tokenizer, folder: Path
) -> None:
    """Write weights, index, configs and tokenizer into an existing folder.

    Args:
        state: of transformers' model, with all experts of a layer in one tensor.
        config: content of config.json.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in official_tensors(state).items():
        if shards[-1] and _nbytes(shards[-1]) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    metadata = {"total_size": sum(map(_nbytes, shards))}
    write_json(folder / "model.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    write_tokenizer(tokenizer, folder, CONTEXT)


def official_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The official names, BF16 but for the routers' biases: each expert has its own gate, up and down projection."""
    official: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu() if name.endswith(KEEP_FP32) else tensor.detach().cpu().bfloat16()
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                official[f"{prefix}.{expert}.gate_proj.weight"] = gate.contiguous()
                official[f"{prefix}.{expert}.up_proj.weight"] = up.contiguous()
        elif kind == "down_proj":
            for expert, down in enumerate(tensor):
                official[f"{prefix}.{expert}.down_proj.weight"] = down.contiguous()
        else:
            official[name] = tensor
    return official


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
