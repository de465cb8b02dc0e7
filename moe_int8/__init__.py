"""INT8 (w8a8) inference of DeepSeek V3/R1: the operators.

Weights are int8 with one fp32 scale per output channel, activations are quantised to int8 per token at run time. Each
operator is a `torch.ops.moe_int8.*` custom op: Triton kernels for tensors on a GPU, torch's own integer products on a
CPU. Importing this never initialises CUDA and does not need Triton.
"""

from moe_int8.activation import silu_and_mul, silu_and_mul_quantize
from moe_int8.dense import int8_scaled_mm, w8a8_linear
from moe_int8.moe import fused_moe
from moe_int8.norm import rms_norm, rms_norm_quantize
from moe_int8.quantize import dequantize, quantize_per_channel, quantize_per_token
from moe_int8.routing import grouped_topk

__all__ = [
    "dequantize",
    "fused_moe",
    "grouped_topk",
    "int8_scaled_mm",
    "quantize_per_channel",
    "quantize_per_token",
    "rms_norm",
    "rms_norm_quantize",
    "silu_and_mul",
    "silu_and_mul_quantize",
    "w8a8_linear",
]
