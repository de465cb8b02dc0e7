"""Repair of bfloat16 in Triton's interpreter (seen with 3.9): stores truncate and `tl.dot` multiplies bit patterns.

On a GPU fp32 -> bf16 rounds to nearest, ties to even. With this the interpreter does the same, so that tests can ask
for equal bits. Element-wise arithmetic on bf16 values stays wrong there: the kernels convert to fp32 at once.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    original = interpreter._convert_float
    dot = interpreter.InterpreterBuilder.create_dot

    def convert(x, source, target, rounding):
        if (source, target) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(x).view(np.uint32)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).reshape(x.shape)
        if (source, target) == (tl.bfloat16, tl.float32):
            return (np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << 16).reshape(x.shape)
        return original(x, source, target, rounding)

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(
            convert(handle.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32
        )

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, d, precision, imprecise: dot(
        self, widen(a), widen(b), d, precision, imprecise
    )
