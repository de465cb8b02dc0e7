"""The constants of the numeric contract, shared by the torch definitions and the Triton kernels."""

import torch

CODE_MAX = 127  # symmetric codes: -128 is never produced
STEP = 1 / 127  # scale = amax * STEP, a factor and not a division, so that every device rounds alike
MIN_AMAX = 1e-10  # an all-zero row quantises to zeros with a finite scale
FP32_ACCUMULATE_EVERY = 128  # accumulator="fp32": one exact int32 dot per 128 of K, converted and added in order
INT32_MAX_K = (2**31 - 1) // CODE_MAX**2  # 133,144 products of codes fit int32 (132,104 if a foreign weight holds -128)
ACCUMULATORS = ("int32", "fp32")
ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
