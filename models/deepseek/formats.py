"""How the projections of a checkpoint are stored: what config.json says, what its files hold, and that both agree.

These functions see names, dtypes and shapes only. They raise ValueError with what is wrong and what to do.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from moe_int8.models.deepseek.untrusted import shown
from moe_int8.quantization.block_fp8 import FP8, scale_shape

MAX_BLOCK = 1024  # rows or columns that share an FP8 scale; the official blocks have 128
QUANTIZED = {"int8": torch.int8, "fp8": FP8}
SCALE_SUFFIX = {torch.int8: "_scale", FP8: "_scale_inv"}  # what a quantised weight's name is continued by

Stored = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
Where = Callable[[str], str]  # a tensor's file and name, to begin a message with

# The weights that INT8 checkpoints hold quantised; everything else (embeddings, lm_head, norms, the router
# `mlp.gate`, the MTP layer's eh_proj and shared_head) stays as it is.
_PROJECTION = re.compile(
    r"model\.layers\.\d+\.(?:"
    r"self_attn\.(?P<attention>q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"
    r"|mlp\.(?:(?P<routed>experts)\.\d+\.|(?P<shared>shared_experts)\.)?(?P<mlp>gate_proj|up_proj|down_proj)"
    r")\.weight"
)


def projection_kind(name: str) -> str | None:
    """What kind of quantised weight a tensor is ("q_a_proj", "experts.gate_proj", ...), or None if it is none."""
    match = _PROJECTION.fullmatch(name)
    if match is None:
        return None
    return match["attention"] or f"{match['routed'] or match['shared'] or 'mlp'}.{match['mlp']}"


def declared_format(quantization: Mapping[str, Any]) -> str | None:
    """What a quantization_config says of the weights: "fp8", "int8" or, if it is empty, None."""
    if not quantization:
        return None
    method = quantization.get("quant_method")
    if method == "fp8" and quantization.get("weight_block_size"):
        return "fp8"
    if method in ("w8a8_int8", "int8") or (method == "compressed-tensors" and _is_channel_int8(quantization)):
        return "int8"
    raise ValueError(
        f"the quantisation {shown(method)} (format {shown(quantization.get('format'))}) is not supported; supported "
        "are fp8 in blocks, and INT8 with a scale per channel (w8a8_int8, or compressed-tensors int-quantized with "
        "dynamic scales per token)"
    )


def named_format(names: Collection[str], declared: str | None) -> str:
    """The format "fp8", "int8" or "bf16" as far as the tensors' names tell it, and config.json."""
    named = "fp8" if any(n.endswith("_scale_inv") for n in names) else "int8" if any(map(_is_scale, names)) else "bf16"
    if declared not in (None, named):
        raise ValueError(
            f"config.json says {str(declared).upper()}, but the names of the tensors are those of {named.upper()}: one "
            "of them is of another checkpoint"
        )
    return named


def stored_format(stored: Stored, declared: str | None, where: Where) -> str:
    """The format "fp8", "int8", "bf16" or "fp32" of the projections; the rest is checked elsewhere."""
    first: dict[torch.dtype, str] = {}
    for name, (dtype, _) in stored.items():
        first.setdefault(dtype, name)
    held = next((form for form, dtype in QUANTIZED.items() if dtype in first), None)
    if declared is not None and held is None:
        raise ValueError(
            f"config.json says {declared.upper()}, but the files hold no {declared.upper()} weights: remove its "
            f"quantization_config, or get the {declared.upper()} files"
        )
    if held is not None and declared not in (None, held):
        raise ValueError(
            f"{where(first[QUANTIZED[held]])} is {held.upper()}, though config.json says {str(declared).upper()}: one "
            "of them is of another checkpoint; get both from one place"
        )
    if held is not None:
        return held
    kept = {name: dtype for name, (dtype, _) in stored.items() if projection_kind(name)}
    for name, dtype in kept.items():
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"{where(name)} is stored as {dtype}, which is not supported: "
                "get a bfloat16, float32, FP8 or INT8 checkpoint"
            )
    return "bf16" if torch.bfloat16 in kept.values() else "fp32"


def check_int8(stored: Stored, where: Where, ignored: Callable[[str], bool], num_layers: int) -> None:
    """Check that INT8 weights have a scale per output channel and that no projection of a layer in use is left out.

    Args:
        ignored: whether config.json lists a module as not quantised.
        num_layers: those behind are for multi-token prediction and may have any format.
    """
    for name, (dtype, _) in stored.items():
        module = name.removesuffix(".weight")
        if dtype is torch.int8:
            _check_channel_scale(stored, name, where)
            if ignored(module):
                raise ValueError(
                    f"{where(name)} is INT8, though config.json lists it under ignore: one of them is wrong"
                )
        elif projection_kind(name) and int(name.split(".")[2]) < num_layers and not ignored(module):
            raise ValueError(
                f"{where(name)} is {dtype} in an INT8 checkpoint whose config.json does not list it under ignore: "
                "the checkpoint is incomplete, or its config.json wrong"
            )


def check_fp8(stored: Stored, where: Where, block: tuple[int, int]) -> None:
    """Check that every FP8 weight has a scale per block, and every scale its weight."""
    for name, (dtype, shape) in stored.items():
        if dtype is FP8:
            if f"{name}_scale_inv" not in stored:
                raise ValueError(f"{where(name)} is FP8 without a {name}_scale_inv: the checkpoint is incomplete")
            scale_dtype, scale = stored[f"{name}_scale_inv"]
            right = len(shape) == 2 and scale == scale_shape((shape[0], shape[1]), block)
            if scale_dtype is not torch.float32 or not right:
                raise ValueError(
                    f"{where(name)} is {list(shape)} and its weight_scale_inv {scale_dtype} {list(scale)}; "
                    f"expected one float32 scale per block of {block[0]}x{block[1]}"
                )
        elif name.endswith("_scale_inv") and stored.get(name.removesuffix("_scale_inv"), (None,))[0] is not FP8:
            raise ValueError(f"{where(name)} is the scale of no FP8 weight: download it again")


def fp8_block(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    block = quantization.get("weight_block_size", [128, 128])
    if not isinstance(block, list) or [type(b) is int and 0 < b <= MAX_BLOCK for b in block] != [True, True]:
        raise ValueError(f"weight_block_size must be two whole numbers from 1 to {MAX_BLOCK}, got {shown(block)}")
    return block[0], block[1]


def _is_scale(name: str) -> bool:
    return name.endswith(".weight_scale")


def _check_channel_scale(stored: Stored, name: str, where: Where) -> None:
    if f"{name}_scale_inv" in stored:
        raise ValueError(
            f"{where(name)} is INT8 in blocks (blockwise_int8), which is not supported: "
            "convert the FP8 or BF16 checkpoint to INT8 with a scale per channel"
        )
    if f"{name}_scale" not in stored:
        raise ValueError(f"{where(name)} is INT8 without a {name}_scale: the checkpoint is incomplete")
    shape, (dtype, scale) = stored[name][1], stored[f"{name}_scale"]
    right = len(shape) == 2 and scale in ((shape[0],), (shape[0], 1))
    if not right or dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"{where(name)} is {list(shape)} and its scale {list(scale)} {dtype}; supported is a scale per output "
            "channel, float32 or bfloat16 [N] or [N, 1] for a weight [N, K]"
        )


def _is_channel_int8(quantization: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors says: INT8 weights with a scale per channel, activations quantised per token."""
    try:
        return quantization["format"] == "int-quantized" and all(
            (weights["num_bits"], weights["type"], weights["strategy"], weights["symmetric"])
            == (8, "int", "channel", True)
            and (inputs["num_bits"], inputs["type"], inputs["strategy"], inputs["dynamic"]) == (8, "int", "token", True)
            for group in quantization["config_groups"].values()
            for weights, inputs in [(group["weights"], group["input_activations"])]
        )
    except (KeyError, TypeError, AttributeError):
        return False
