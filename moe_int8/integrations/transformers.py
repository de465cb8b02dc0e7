"""A DeepSeek V2 or V3 of Hugging Face transformers in INT8: its projections and experts replaced by ours, in place."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from moe_int8.check import check_accumulator
from moe_int8.dense import w8a8_linear
from moe_int8.moe import fused_moe
from moe_int8.quantize import quantize_per_channel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
EXPERTS = ("DeepseekV2Experts", "DeepseekV3Experts")  # classes of transformers that hold all experts of a layer
# kv_b_proj stays as it is, as in our own model: its weight serves two forms of attention, which int8 would set apart.
PROJECTIONS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj")


class Int8Linear(nn.Module):
    """y = x @ W.T + bias with W [N, K] int8, made from a floating-point layer."""

    weight: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(self, linear: nn.Linear, accumulator: str) -> None:
        super().__init__()
        weight, weight_scale = quantize_per_channel(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.bias = linear.bias
        self.accumulator = accumulator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N] in x's dtype."""
        return w8a8_linear(x, self.weight, self.weight_scale, self.bias, accumulator=self.accumulator)


class Int8Experts(nn.Module):
    """All routed experts of a layer: w13 [E, 2I, H] and w2 [E, H, I] int8, made from a floating-point module."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor

    def __init__(self, experts: nn.Module, accumulator: str) -> None:
        super().__init__()
        for name, parameter in (("w13", experts.gate_up_proj), ("w2", experts.down_proj)):
            assert isinstance(parameter, torch.Tensor)
            E, N, _ = parameter.shape
            weight = torch.empty(parameter.shape, dtype=torch.int8, device=parameter.device)
            weight_scale = torch.empty((E, N, 1), dtype=torch.float32, device=parameter.device)
            for expert, whole in enumerate(parameter.detach()):  # one at a time: quantizing passes through fp32
                weight[expert], weight_scale[expert] = quantize_per_channel(whole)
            self.register_buffer(name, weight)
            self.register_buffer(f"{name}_scale", weight_scale)
        self.accumulator = accumulator

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[M, H], ids [M, topk], weights [M, topk] with the routed scaling factor in them -> [M, H]."""
        return fused_moe(
            hidden_states,
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            top_k_weights.float(),
            top_k_index,
            accumulator=self.accumulator,
        )


def quantize_(model: "PreTrainedModel", accumulator: str = "int32") -> "PreTrainedModel":
    """Quantize a loaded DeepSeek V2 or V3 of transformers to INT8 in place, for inference.

    Every projection but kv_b_proj and all routed experts become int8 modules; each floating-point weight is freed
    before the next one is taken. Embeddings, norms, routers, kv_b_proj and lm_head stay as they are.

    Args:
        model: with bf16 or fp32 weights, on CPU or CUDA devices. Its gradients are switched off. Move it with
            `.to(device)` afterwards, but do not change its dtype: scales stay fp32.
        accumulator: "int32" or "fp32", of the int8 GEMMs.

    Returns:
        the same model.

    Raises:
        ValueError: not such a model, float16, weights that are not in memory, or already quantized; nothing is changed.
    """
    check_accumulator(accumulator)
    found = _replaceable(model)
    model.requires_grad_(False)
    while found:
        name, module = found.popitem()
        parent, _, child = name.rpartition(".")
        made = Int8Linear(module, accumulator) if isinstance(module, nn.Linear) else Int8Experts(module, accumulator)
        setattr(model.get_submodule(parent), child, made.train(module.training))
    return model


def _replaceable(model: "PreTrainedModel") -> dict[str, nn.Module]:
    """The modules to replace, by name; raises ValueError before anything is changed."""
    model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model must be one of {' and '.join(MODEL_TYPES)}, got {model_type}")
    if model.config.hidden_act != "silu":
        raise ValueError(f"the experts' activation must be silu, got {model.config.hidden_act}")
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ in EXPERTS
        or (isinstance(module, nn.Linear) and name.rpartition(".")[2] in PROJECTIONS)
    }
    if not found:
        raise ValueError(f"the {model_type} has no floating-point projections: it is quantized already")
    for name, module in found.items():
        for parameter in module.parameters():
            if parameter.device.type not in ("cpu", "cuda"):
                raise ValueError(f"{name} is on {parameter.device}: load the model without offloading, on cpu or cuda")
            if parameter.dtype not in (torch.bfloat16, torch.float32):
                raise ValueError(f"{name} is {parameter.dtype}: load the model with dtype=torch.bfloat16")
    return found
