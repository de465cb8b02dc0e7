"""Tiny random models: transformers' own as the reference, its files for ours to load, and a driver of ours."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

from moe_int8.models.deepseek.cache import BLOCK_SIZE, Batch, LatentCache, blocks_for
from moe_int8.models.deepseek.formats import projection_kind
from moe_int8.models.deepseek.model import DeepseekModel
from moe_int8.quantize import dequantize, quantize_per_channel

VOCAB = 101  # a prime: no tensor-parallel size divides it, so the last rank's part is padded
CONTEXT = 256
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 4,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
PLAIN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,  # not qk_nope_head_dim: a wrong split of kv_b_proj shows
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": YARN,
    "initializer_range": 0.125,  # 1 / sqrt(hidden_size): every linear layer keeps the size of its input
}
V3: dict[str, Any] = SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
V2: dict[str, Any] = SIZES | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "n_shared_experts": 2,
    "topk_method": "greedy",
    "norm_topk_prob": False,  # transformers' V2 router never normalizes
    "routed_scaling_factor": 1.5,
}


def make_reference(config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """transformers' fp32 model with random weights, gates and correction biases that matter, and unequal norms."""
    torch.manual_seed(seed)
    model = _empty_reference(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("gate.weight"):
                parameter.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    return model


def save(model: PreTrainedModel, folder: Path, **config: Any) -> Path:
    """Write the model as a checkpoint with the official names; `config` is added to its config.json."""
    model.save_pretrained(folder)
    edit_config(folder, **config)
    return folder


def edit_config(folder: Path, **config: Any) -> None:
    """Set fields of a config.json; None removes one."""
    path = folder / "config.json"
    merged = json.loads(path.read_text()) | config
    path.write_text(json.dumps({name: value for name, value in merged.items() if value is not None}))


def quantized_copy(folder: Path, int8_folder: Path, float_folder: Path) -> None:
    """Write an fp32 checkpoint twice: with int8 codes and scales, and with the fp32 values that these stand for."""
    codes: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        codes[name] = values[name] = tensor
        if projection_kind(name):
            codes[name], codes[f"{name}_scale"] = quantize_per_channel(tensor)
            values[name] = dequantize(codes[name], codes[f"{name}_scale"])
    for copy, tensors in ((int8_folder, codes), (float_folder, values)):
        copy.mkdir(parents=True)
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        (copy / "config.json").write_text((folder / "config.json").read_text())


def load_reference(folder: Path) -> PreTrainedModel:
    """transformers' model with the fp32 weights of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    model = _reference_class(config).from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    return model.eval()


def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits after every token of one sequence, [T, V]."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids of the tiny vocabulary."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Driver:
    """Runs chosen tokens through a model, with the caller in charge of passes and blocks.

    Args:
        blocks: each sequence's blocks, in the order in which it fills them.
    """

    def __init__(self, model: DeepseekModel, blocks: Sequence[Sequence[int]] = ((0, 1, 2, 3),)) -> None:
        self.model = model
        self.blocks = blocks
        number = max(max(own) for own in blocks) + 1
        self.cache = LatentCache(model.config, number, model.precision.dtype, torch.device("cpu"))

    def hidden(
        self, tokens: Sequence[Sequence[int]], spans: Sequence[range], decode: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over tokens[i][spans[i]] of every sequence i: the hidden states after and before the last norm."""
        ids = [
            token for sequence, span in zip(tokens, spans, strict=True) for token in sequence[span.start : span.stop]
        ]
        batch = make_batch(self.blocks[: len(spans)], spans, decode)
        return self.model(torch.tensor(ids), batch, self.cache)

    def logits(self, tokens: Sequence[Sequence[int]], spans: Sequence[range], decode: bool = False) -> torch.Tensor:
        """The logits of such a pass, [tokens of all sequences, V]."""
        return self.model.logits(self.hidden(tokens, spans, decode)[0])


def make_batch(blocks: Sequence[Sequence[int]], spans: Sequence[range], decode: bool = False) -> Batch:
    """The batch of one pass over the positions `spans` of sequences that own `blocks`."""
    width = max(blocks_for(span.stop) for span in spans)
    return Batch(
        positions=torch.tensor([p for span in spans for p in span]),
        slots=torch.tensor(
            [
                own[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                for own, span in zip(blocks, spans, strict=True)
                for p in span
            ]
        ),
        block_table=torch.tensor([[*own, *[own[-1]] * width][:width] for own in blocks]),
        lengths=torch.tensor([span.stop for span in spans]),
        spans=None if decode else list(spans),
    )


def whole_logits(model: DeepseekModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits after every token of one sequence, in one prefill pass, [T, V]."""
    return Driver(model).logits([token_ids], [range(len(token_ids))])


def _reference_class(config: dict[str, Any]) -> type[PreTrainedModel]:
    return {"DeepseekV3ForCausalLM": DeepseekV3ForCausalLM, "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM}[
        config["architectures"][0]
    ]


def _empty_reference(config: dict[str, Any]) -> PreTrainedModel:
    v3 = config["architectures"][0] == "DeepseekV3ForCausalLM"
    made = (DeepseekV3Config if v3 else DeepseekV2Config)(**config)
    made._experts_implementation = "eager"
    return _reference_class(config)(made).eval()
