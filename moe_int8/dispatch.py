"""Which implementation a tensor takes: Triton on a GPU, plain torch on a CPU."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(x: torch.Tensor) -> bool:
    """True for tensors that go through the Triton kernels: those on a GPU, and all under Triton's interpreter.

    The kernels are imported only behind this test, so that a machine without Triton converts and runs on its CPU.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA (or ROCm) one; nothing falls back silently.
    """
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"moe_int8 runs on cpu and cuda devices, got a tensor on {x.device}")
    return x.is_cuda or INTERPRETED
