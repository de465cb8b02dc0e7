"""Writes tiny checkpoints laid out as the official DeepSeek ones: FP8 blocks with `weight_scale_inv`, or BF16."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moe_int8.models.deepseek.formats import projection_kind
from moe_int8.quantization.block_fp8 import dequantize_block_fp8, quantize_block_fp8

TINY: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "torch_dtype": "bfloat16",
    "hidden_size": 160,  # not a multiple of 128: ragged blocks along K
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_intermediate_size": 64,
    "intermediate_size": 192,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,  # with the latent: 576 rows of kv_a_proj_with_mqa, 4.5 blocks
    "v_head_dim": 32,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "num_nextn_predict_layers": 1,
}
TINY_V2_LITE = TINY | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "num_nextn_predict_layers": 0,
}


def write_official_checkpoint(
    folder: Path, config: dict[str, Any], seed: int = 0, fp8: bool = True, shards: int = 3
) -> dict[str, torch.Tensor]:
    """Write a checkpoint with random weights.

    Neighbouring tensors lie in different shards, and so do weights and their scales, in both orders.

    Args:
        config: content of config.json; quantization_config is added for FP8.
        fp8: projections in FP8 blocks, or all weights in BF16.

    Returns:
        the fp32 tensors that the files stand for, by name and without scales.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    meant: dict[str, torch.Tensor] = {}
    for i, (name, shape) in enumerate(shapes(config).items()):
        w = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            meant[name] = files[i % shards][name] = w * 0.1  # fp32, as in the official files
        elif fp8 and projection_kind(name):
            weight, scale = quantize_block_fp8(w * shape[1] ** -0.5)
            files[i % shards][name] = weight
            files[(i + 1) % shards][f"{name}_scale_inv"] = scale
            meant[name] = dequantize_block_fp8(weight, scale)
        else:
            stored = (1 + 0.1 * w if len(shape) == 1 else w * shape[1] ** -0.5).bfloat16()
            files[i % shards][name] = stored
            meant[name] = stored.float()

    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(files):
        file = f"model-{i + 1:05d}-of-{shards:06d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    if fp8:
        blocks = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        config = config | {"quantization_config": blocks}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"temperature": 0.6})
    _write_json(folder / "tokenizer.json", {"version": "1.0"})
    _write_json(folder / "tokenizer_config.json", {"model_max_length": 128})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_deepseek.py").write_text("raise SystemExit('remote code')\n")
    return meant


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model, without scales, in the order of its layers."""
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config.get("q_lora_rank"), config["kv_lora_rank"]
    E, inter = config["n_routed_experts"], config["moe_intermediate_size"]
    vocabulary = (config["vocab_size"], hidden)

    def mlp(prefix: str, intermediate: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}.gate_proj.weight": (intermediate, hidden),
            f"{prefix}.up_proj.weight": (intermediate, hidden),
            f"{prefix}.down_proj.weight": (hidden, intermediate),
        }

    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary}
    for i in range(layers + config.get("num_nextn_predict_layers", 0)):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        made[f"{layer}.input_layernorm.weight"] = (hidden,)
        if q_rank is None:
            made[f"{attention}.q_proj.weight"] = (heads * (nope + rope), hidden)
        else:
            made[f"{attention}.q_a_proj.weight"] = (q_rank, hidden)
            made[f"{attention}.q_a_layernorm.weight"] = (q_rank,)
            made[f"{attention}.q_b_proj.weight"] = (heads * (nope + rope), q_rank)
        made[f"{attention}.kv_a_proj_with_mqa.weight"] = (kv_rank + rope, hidden)
        made[f"{attention}.kv_a_layernorm.weight"] = (kv_rank,)
        made[f"{attention}.kv_b_proj.weight"] = (heads * (nope + v), kv_rank)
        made[f"{attention}.o_proj.weight"] = (hidden, heads * v)
        made[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if i < config["first_k_dense_replace"]:
            made |= mlp(f"{layer}.mlp", config["intermediate_size"])
        else:
            made[f"{layer}.mlp.gate.weight"] = (E, hidden)
            if config.get("topk_method", "noaux_tc") == "noaux_tc":
                made[f"{layer}.mlp.gate.e_score_correction_bias"] = (E,)
            for e in range(E):
                made |= mlp(f"{layer}.mlp.experts.{e}", inter)
            if config.get("n_shared_experts"):
                made |= mlp(f"{layer}.mlp.shared_experts", config["n_shared_experts"] * inter)
        if i >= layers:  # a multi-token-prediction layer
            made[f"{layer}.embed_tokens.weight"] = vocabulary
            made[f"{layer}.enorm.weight"] = (hidden,)
            made[f"{layer}.hnorm.weight"] = (hidden,)
            made[f"{layer}.eh_proj.weight"] = (hidden, 2 * hidden)
            made[f"{layer}.shared_head.norm.weight"] = (hidden,)
            made[f"{layer}.shared_head.head.weight"] = vocabulary
    made["model.norm.weight"] = (hidden,)
    made["lm_head.weight"] = vocabulary
    return made


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2))
