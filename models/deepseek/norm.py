"""RMSNorm as a module: the weight, and the residual sum that comes with it."""

import torch
from torch import nn

from moe_int8.norm import rms_norm
from moe_int8.parallel.linear import EVERYTHING, WeightSource, expect_shape


class RMSNorm(nn.Module):
    """y = x * rsqrt(mean(x^2) + eps) * weight over the last dimension, in fp32, rounded once."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""
        return rms_norm(x, self.weight, self.eps, residual)

    def load(self, source: WeightSource) -> None:
        """Fill the weight."""
        expect_shape(source, self.weight.shape)
        self.weight.data.copy_(source.read_float(EVERYTHING, EVERYTHING, self.weight.dtype))
