"""Weight formats of checkpoints, in plain torch."""

from moe_int8.quantization.block_fp8 import dequantize_block_fp8, quantize_block_fp8

__all__ = ["dequantize_block_fp8", "quantize_block_fp8"]
