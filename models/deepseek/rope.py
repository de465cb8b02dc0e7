"""Rotary position embedding on interleaved pairs (x0, x1), (x2, x3), …, with YaRN's blend of frequencies."""

import math

import torch
from torch import nn

from moe_int8.models.deepseek.config import RopeConfig, yarn_mscale


def inverse_frequencies(dim: int, rope: RopeConfig) -> torch.Tensor:
    """Angle per position of each pair: theta^(-2i/dim), blended with its 1/factor by YaRN.

    Pairs that turn more than `beta_fast` times over the original context keep their frequency, those that turn less
    than `beta_slow` times are slowed by `factor`, and a linear ramp lies between (YaRN, section 3.2).

    Args:
        dim: qk_rope_head_dim.

    Returns:
        fp32 [dim / 2], on the CPU.
    """
    pairs = torch.arange(0, dim, 2, dtype=torch.float32)
    plain = 1.0 / rope.theta ** (pairs / dim)
    if rope.factor <= 1:
        return plain

    def pair_with(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low = min(max(math.floor(pair_with(rope.beta_fast)), 0), dim - 1)  # from dim / 2 on, all pairs keep theirs
    high = min(math.ceil(pair_with(rope.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / rope.factor * ramp


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by the angles of their positions.

    The frequencies are built in fp32 whatever dtype the model is moved to.
    """

    def __init__(self, dim: int, rope: RopeConfig) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.inverse_frequencies = inverse_frequencies(dim, rope)
        self.magnitude = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> (cos, sin), fp32 [T, dim / 2]."""
        if self.inverse_frequencies.device != positions.device:
            self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions[:, None].float() * self.inverse_frequencies
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (x[2i], x[2i + 1]) by its angle; computed in fp32, returned in x's dtype.

    Args:
        x: [T, ..., dim].
        cos, sin: fp32 [T, dim / 2].
    """
    between = (1,) * (x.ndim - 2)
    cos = cos.view(cos.shape[0], *between, cos.shape[1])
    sin = sin.view(sin.shape[0], *between, sin.shape[1])
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
